"""Cold start: supervised fine-tuning on worked answers, of a base model or of a tiny one built from scratch.

The paper trains a cold-start model; a tiny one lets a run start without any download. The folder it writes is an
ordinary Hugging Face model folder, with ``coldstart.json`` saying what made it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gspo.config import ColdStartConfig, Recipe
from gspo.errors import ConfigError, NumericsError, TaskError
from gspo.policy.model import Policy, load_policy, pick_device
from gspo.policy.packing import collate, plan_microbatches
from gspo.seeding import seed
from gspo.tasks import Task
from gspo.training.build import encoder, inherit, load_options, make_task
from gspo.training.record import require_writable
from gspo.types import Prompt, TokenRow

Progress = Callable[[int, int, float], None]
RECORD = "coldstart.json"
IRRELEVANT = {"name", "max_prompt_length", "overlong_prompts"}  # task options that a cold start does not read


def coldstart(recipe: Recipe, *, force: bool = False, progress: Progress | None = None) -> Path:
    """Fine-tune and write the model folder ``model.path``; returns it.

    A folder that the same settings made is kept (unless ``force``); one made otherwise is a ConfigError.
    """
    config = recipe.coldstart
    if config is None:
        raise ConfigError("the recipe has no [coldstart] section")
    folder = Path(recipe.model.path or f"runs/coldstart/{recipe.run.name}")
    if folder.exists() and not force and _made_by(folder, fingerprint(recipe)):
        return folder
    require_writable(str(folder), option="model.path")
    _refuse_sizes(config)
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    task_config = inherit(config.task, recipe.task)
    task = make_task(task_config, seed(recipe.run.seed, "coldstart-task") % 2**31)
    demonstrations = _demonstrations(task.prompts, config.completion_column)
    policy = _base_policy(recipe, config) if config.base else _new_policy(recipe, config, task, demonstrations)
    rows = example_rows(policy, task.prompts, demonstrations, encoder(policy, task_config), config.max_length)
    loss = fine_tune(policy, rows, config, run_seed=recipe.run.seed, progress=progress)
    record = {
        "fingerprint": fingerprint(recipe),
        "final_loss": loss,
        "examples": len(rows),
        "too_long": len(task) - len(rows),
        "max_length": config.max_length,
    }
    try:
        policy.save(folder, record=record, name=RECORD)
    except OSError as error:
        raise ConfigError(f"model.path = {str(folder)!r} cannot be written: {error.strerror}") from error
    return folder


def left_out(folder: Path) -> str | None:
    """What the cold start that made ``folder`` left out, for people; None for nothing."""
    record = folder / RECORD
    made = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    if not made.get("too_long"):
        return None
    return (
        f"cold start: {made['too_long']} of {made['too_long'] + made['examples']} examples were left out, longer than "
        f"coldstart.max_length = {made['max_length']} tokens"
    )


def _refuse_sizes(config: ColdStartConfig) -> None:
    """ConfigError for sizes that no model has."""
    if config.base:
        return
    if config.hidden_size % config.num_heads:
        raise ConfigError(
            f"coldstart.hidden_size = {config.hidden_size} is not divisible by coldstart.num_heads = {config.num_heads}"
        )
    if config.architecture == "qwen3_moe" and config.num_experts_per_tok > config.num_experts:
        raise ConfigError(
            f"coldstart.num_experts_per_tok = {config.num_experts_per_tok} is more than coldstart.num_experts = "
            f"{config.num_experts}: a token cannot be sent to more experts than there are"
        )


def fingerprint(recipe: Recipe) -> str:
    """Hash of every setting that the cold start's result depends on."""
    assert recipe.coldstart is not None
    parts = {
        "coldstart": recipe.coldstart.model_dump(mode="json"),
        "task": inherit(recipe.coldstart.task, recipe.task).model_dump(mode="json", exclude=IRRELEVANT),
        "seed": recipe.run.seed,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _made_by(folder: Path, wanted: str) -> bool:
    """Whether this cold start made the folder. Raises ConfigError for anything else that is in the way."""
    record = folder / RECORD
    made = json.loads(record.read_text(encoding="utf-8"))["fingerprint"] if record.is_file() else None
    if made == wanted:
        return True
    what = "was made by a cold start with other settings" if made else "exists and was not made by a cold start"
    raise ConfigError(
        f"model.path = {str(folder)!r} {what}. Give another model.path, "
        f"or run `gspo coldstart RECIPE --force` to replace it"
    )


def _demonstrations(prompts: Sequence[Prompt], column: str) -> list[str]:
    """The worked answers, one for each prompt."""
    found = [prompt.metadata.get(column) for prompt in prompts]
    missing = [prompt.id for prompt, text in zip(prompts, found, strict=True) if not isinstance(text, str) or not text]
    if missing:
        raise TaskError(
            f"{len(missing)} of {len(prompts)} examples have no text in column {column!r} (the first: {missing[0]}); "
            f"set coldstart.completion_column"
        )
    return [str(text) for text in found]


def _base_policy(recipe: Recipe, config: ColdStartConfig) -> Policy:
    """The base model, all weights trainable: the result is a plain model folder, adapters come later.

    A base that ends in ".gguf" is a file inside the folder (or ``package:NAME``) before its last slash.
    """
    folder, _, file = (config.base or "").rpartition("/")
    source = (folder, file) if file.endswith(".gguf") else (config.base or "", None)
    return load_policy(replace(load_options(recipe), path=source[0], gguf_file=source[1], lora_rank=0))


def _new_policy(recipe: Recipe, config: ColdStartConfig, task: Task, demonstrations: Sequence[str]) -> Policy:
    """A tiny model with random weights and a character-level tokenizer over the examples' alphabet."""
    texts = [_text_of(prompt) for prompt in task.prompts]
    alphabet = sorted(set().union(*map(set, texts), *map(set, demonstrations)))
    tokenizer = character_tokenizer(alphabet, config.max_length)
    torch.manual_seed(seed(recipe.run.seed, "weights") % 2**63)
    model = tiny_model(config, len(tokenizer), tokenizer.eos_token_id)
    return Policy(model.to(pick_device(recipe.run.device)), tokenizer).eval()


def _text_of(prompt: Prompt) -> str:
    if prompt.text is None:
        raise TaskError("a model built from scratch has no chat template: its task must give prompts as text")
    return prompt.text


def character_tokenizer(alphabet: Sequence[str], max_length: int) -> Any:
    """A tokenizer whose tokens are single characters, with <pad>, <eos> and <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(config: ColdStartConfig, vocab_size: int, eos_token_id: int) -> Any:
    """A Qwen3 or Qwen3-MoE with random weights (torch's global generator), tied embeddings."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": 4 * config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": max(1, config.num_heads // 2),
        "head_dim": config.hidden_size // config.num_heads,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": 0,
    }
    if config.architecture == "qwen3":
        return AutoModelForCausalLM.from_config(Qwen3Config(**common))
    moe = Qwen3MoeConfig(
        **common,
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.hidden_size // 2,
        norm_topk_prob=True,
    )
    return AutoModelForCausalLM.from_config(moe)


def example_rows(
    policy: Policy,
    prompts: Sequence[Prompt],
    demonstrations: Sequence[str],
    encode: Callable[[Prompt], np.ndarray],
    max_length: int,
) -> list[TokenRow]:
    """Prompt and demonstration as token rows whose scored part is the demonstration and the end of sequence."""
    eos = policy.tokenizer.eos_token_id
    rows = []
    for prompt, text in zip(prompts, demonstrations, strict=True):
        head = encode(prompt)
        tail = np.array([*policy.tokenizer.encode(text, add_special_tokens=False), eos], dtype=np.int64)
        if len(head) + len(tail) > max_length:
            continue
        mask = np.zeros(len(head) + len(tail), dtype=np.bool_)
        mask[len(head) :] = True
        zeros = np.zeros(len(mask), dtype=np.float32)
        rows.append(TokenRow(np.concatenate([head, tail]), mask, zeros, np.full(len(mask), -1)))
    if not rows:
        raise TaskError(f"no example fits into coldstart.max_length = {max_length} tokens; raise it")
    return rows


def fine_tune(
    policy: Policy,
    rows: Sequence[TokenRow],
    config: ColdStartConfig,
    *,
    run_seed: int,
    progress: Progress | None = None,
) -> float:
    """Minimise the mean negative log-prob of the scored tokens of each batch; returns the last loss in nats.

    AdamW without weight decay; linear warm-up over a tenth of the steps, then cosine to 0. Batches are drawn without
    replacement within an epoch, in an order that follows from the seed.
    """
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), lr=config.learning_rate, weight_decay=0.0, betas=(0.9, 0.99)
    )
    warmup = max(1, config.steps // 10)
    value = math.nan
    for step in range(config.steps):
        scale = (
            (step + 1) / warmup
            if step < warmup
            else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (config.steps - warmup)))
        )
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * scale
        batch = [rows[i] for i in _batch_indices(len(rows), config.batch_size, step, run_seed)]
        total = sum(row.num_scored for row in batch)
        optimizer.zero_grad()
        value = 0.0
        for part in plan_microbatches([[len(row.token_ids)] for row in batch], 16384):
            logprobs, _ = policy(collate([batch[i] for i in part], policy.device))
            loss = -logprobs.sum() / total
            loss.backward()
            value += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0))
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise NumericsError(
                f"cold start batch {step}: loss {value}, gradient norm {norm}; lower coldstart.learning_rate"
            )
        optimizer.step()
        if progress:
            progress(step + 1, config.steps, value)
    return value


def _batch_indices(size: int, batch_size: int, step: int, run_seed: int) -> list[int]:
    """Indices of batch ``step`` of an endless stream of shuffled epochs."""
    wanted = range(step * batch_size, (step + 1) * batch_size)
    orders: dict[int, np.ndarray] = {}
    out = []
    for position in wanted:
        epoch, offset = divmod(position, size)
        if epoch not in orders:
            key = seed(run_seed, "coldstart-order", epoch)
            orders[epoch] = np.random.Generator(np.random.Philox(key=key)).permutation(size)
        out.append(int(orders[epoch][offset]))
    return out
