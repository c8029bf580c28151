"""Rollout speed of the local engine against transformers' own generate, as a ratio measured in one run.

    python benchmarks/rollout.py [--rows 64] [--new-tokens 128] [--rounds 3] [--spread]

Both sample the same prompts (groups of 8) with a tiny Qwen3 of random weights and return the log-probs of what they
sampled: A B A B, medians. ``--spread`` gives rows different lengths, as real completions have: there the engine lets
rows leave and others join. Prints JSON with tokens per second of both and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo.engines.local import LocalEngine
from gspo.types import Request, Sampling

VOCABULARY = 128
GROUP = 8
EOS = 1


def tiny_model() -> Qwen3ForCausalLM:
    """0.8M parameters: hidden 128, 4 layers."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def prompts(rows: int, spread: bool) -> list[np.ndarray]:
    """One prompt for each group, of 32 tokens (or of 16 to 48)."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(16, 49, rows // GROUP) if spread else [32] * (rows // GROUP)
    return [rng.integers(2, VOCABULARY, length) for length in lengths]


def run_engine(model: Qwen3ForCausalLM, texts: list[np.ndarray], new_tokens: int, batch: int, eos: int) -> int:
    """Sampled tokens."""
    engine = LocalEngine(model, max_batch_size=batch)
    sampling = Sampling(max_new_tokens=new_tokens, eos_token_ids=(eos,))
    engine.submit(
        [
            Request(f"{group}.{index}", ids, sampling, seed=group * GROUP + index)
            for group, ids in enumerate(texts)
            for index in range(GROUP)
        ]
    )
    count = 0
    while finished := engine.poll():
        count += sum(len(completion.token_ids) for completion in finished)
    return count


def run_generate(model: Qwen3ForCausalLM, texts: list[np.ndarray], new_tokens: int, batch: int, eos: int) -> int:
    """Sampled tokens, up to and with the end of each row, in batches of ``batch`` rows."""
    count = 0
    for start in range(0, len(texts), batch // GROUP):
        part = texts[start : start + batch // GROUP]
        width = max(map(len, part))
        ids = torch.zeros((len(part), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(part):
            ids[row, width - len(text) :] = torch.as_tensor(text)
            mask[row, width - len(text) :] = 1
        with torch.no_grad():
            output = model.generate(
                ids.repeat_interleave(GROUP, 0),
                attention_mask=mask.repeat_interleave(GROUP, 0),
                do_sample=True,
                top_k=0,
                max_new_tokens=new_tokens,
                eos_token_id=eos,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        new = output.sequences[:, width:]
        logits = torch.stack(output.logits, dim=1)
        torch.log_softmax(logits, -1).gather(-1, new.unsqueeze(-1))
        before_end = (new == eos).cumsum(1) - (new == eos).long() == 0
        count += int(before_end.sum())
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spread", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_model()
    texts = prompts(options.rows, options.spread)
    eos = EOS if options.spread else VOCABULARY  # an id that is never sampled: every row runs to the limit
    rates: dict[str, list[float]] = {"engine": [], "generate": []}
    for round_number in range(options.rounds + 1):
        for name, run in (("engine", run_engine), ("generate", run_generate)):
            start = time.perf_counter()
            count = run(model, texts, options.new_tokens, options.batch, eos)
            if round_number:  # the first round warms up
                rates[name].append(count / (time.perf_counter() - start))
    engine, generate = (statistics.median(rates[name]) for name in ("engine", "generate"))
    print(
        json.dumps(
            {
                "engine_tokens_per_s": round(engine),
                "generate_tokens_per_s": round(generate),
                "ratio": round(engine / generate, 3),
                "rows": options.rows,
                "new_tokens": options.new_tokens,
                "spread": options.spread,
            }
        )
    )


if __name__ == "__main__":
    main()
