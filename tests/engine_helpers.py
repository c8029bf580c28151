"""Tiny models and requests that the engine's tests share."""

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gspo.engines.check import drain
from gspo.engines.local import LocalEngine
from gspo.policy.logprobs import logit_transform_of, selected_logprobs
from gspo.types import Request, Sampling

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def gpt2():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **IDS))


def qwen3_moe():
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes))


def gemma2():
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=5, final_logit_softcapping=4.0))


def llama4():
    """Chunked attention: the family that cannot join."""
    sizes = {"attention_chunk_size": 6, "num_local_experts": 2, "intermediate_size_mlp": 32}
    return Llama4ForCausalLM(Llama4TextConfig(**SIZES, **sizes, **IDS))


FAMILIES = {
    "qwen3": qwen3,
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3_moe": qwen3_moe,
    "gpt2": gpt2,
    "gemma2": gemma2,
    "llama4": llama4,
}


def build(family="qwen3", seed=0):
    """A model whose distributions are far from uniform."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model.eval()


def request(name, ids=(5, 6, 7), seed=1, **sampling):
    return Request(name, np.array(ids, dtype=np.int64), Sampling(**sampling), seed=seed)


def run(model, requests, **options):
    engine = LocalEngine(model, **options)
    engine.submit(requests)
    return drain(engine)


def mixed_requests(groups=4, members=3):
    """Groups of equal prompts; prompt lengths, budgets and temperatures all differ."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, length) for length in (3, 14, 1, 8, 5)[:groups]]
    return [
        request(
            f"{group}.{member}",
            prompts[group],
            seed=100 * group + member,
            temperature=(1.0, 0.7, 0.0)[member % 3],
            max_new_tokens=4 + 5 * member + group,
            eos_token_ids=(3, 4),
        )
        for group in range(groups)
        for member in range(members)
    ]


def worst_difference(left, right):
    """Largest log-prob difference; infinite where the ids differ."""
    assert left.keys() == right.keys()
    if any(not np.array_equal(left[name].token_ids, right[name].token_ids) for name in left):
        return float("inf")
    return max(float(np.abs(left[name].logprobs - right[name].logprobs).max(initial=0)) for name in left)


def learner_logprobs(model, requests, completions):
    """The learner's way: one right-padded forward over all rows, hidden states, chunked head."""
    full = [np.concatenate([r.token_ids, completions[r.id].token_ids]) for r in requests]
    ids = torch.zeros((len(full), max(map(len, full))), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(full):
        ids[row, : len(tokens)] = torch.as_tensor(tokens)
        mask[row, : len(tokens)] = 1
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        backbone = model.transformer if isinstance(model, GPT2LMHeadModel) else model.model
        hidden = backbone(ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
        found = {}
        for row, r in enumerate(requests):
            start, tokens = len(r.token_ids), completions[r.id].token_ids
            found[r.id], _ = selected_logprobs(
                hidden[row, start - 1 : start - 1 + len(tokens)],
                model.get_output_embeddings(),
                torch.as_tensor(tokens),
                temperature=r.sampling.temperature or 1.0,
                chunk_size=4,
                logit_transform=logit_transform_of(model.config),
            )
    return found


class CharacterTokenizer:
    """Id n is the character chr(97 + n); id 60 is a special token."""

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=None):
        return "".join("<end>" if token == 60 else chr(97 + token) for token in ids)
