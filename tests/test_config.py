"""The list of options: what a recipe may hold, section by section. A new option is a decision, made here too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import ValidationError

import gspo.config
from gspo.config import Recipe, RolloutConfig, Section
from gspo.recipe_names import section_of
from gspo.recipe_toml import toml_value

OPTIONS = {
    "run": ["name", "output_dir", "seed", "steps", "device", "threads", "save_every", "keep_checkpoints", "trackers"],
    "model": [
        "path",
        "gguf_file",
        "revision",
        "dtype",
        "autocast",
        "attn_implementation",
        "gradient_checkpointing",
        "trust_remote_code",
        "chat_template",
    ],
    "lora": ["rank", "alpha", "target_modules"],
    "task": [
        "source",
        "name",
        "split",
        "subset",
        "size",
        "seed",
        "options",
        "prompt_column",
        "answer_column",
        "system_prompt",
        "prompt_template",
        "chat_template",
        "chat_template_kwargs",
        "max_prompt_length",
        "overlong_prompts",
    ],
    "rewards": ["function", "weight", "signature", "options"],
    "grading": ["workers", "timeout_s", "in_process", "max_failure_rate"],
    "rollout": [
        "prompts_per_step",
        "num_generations",
        "temperature",
        "max_completion_length",
        "stop",
        "max_batch_size",
        "engine",
        "engine_dtype",
        "mask_truncated_completions",
    ],
    "algorithm": [
        "name",
        "importance_sampling_level",
        "advantage",
        "reduction",
        "epsilon",
        "epsilon_high",
        "delta",
        "tau_positive",
        "tau_negative",
        "loss_constant",
        "beta",
        "kl_estimator",
        "proximal_logprobs",
    ],
    "correction": ["kind", "max", "min", "off_policy_mask_delta"],
    "optim": [
        "learning_rate",
        "schedule",
        "warmup_updates",
        "weight_decay",
        "betas",
        "adam_epsilon",
        "max_grad_norm",
        "updates_per_step",
        "minibatches",
        "max_tokens_per_microbatch",
    ],
    "eval": ["every", "task", "num_samples", "temperature", "max_completion_length", "reward"],
    "coldstart": [
        "base",
        "architecture",
        "hidden_size",
        "num_layers",
        "num_heads",
        "num_experts",
        "num_experts_per_tok",
        "max_length",
        "steps",
        "batch_size",
        "learning_rate",
        "completion_column",
        "task",
    ],
}


def sections() -> dict[str, type[Section]]:
    """Section of each table of a recipe."""
    return {name: section_of(info.annotation) for name, info in Recipe.model_fields.items()}


def test_the_options_are_these_and_no_others():
    assert {name: list(section.model_fields) for name, section in sections().items()} == OPTIONS


def test_a_section_has_at_most_15_options_and_a_recipe_110():
    sizes = {name: len(section.model_fields) for name, section in sections().items()}
    assert max(sizes.values()) <= 15, sizes
    assert sum(sizes.values()) <= 110, sizes


def test_every_option_says_what_it_is():
    texts = documented_options()
    silent = [
        f"{name}.{option}"
        for name, section in sections().items()
        for option in section.model_fields
        if not texts.get(section.__name__, {}).get(option, "").endswith((".", ")"))
    ]
    assert silent == []


def test_an_option_that_may_be_none_is_none_by_default():
    """So that leaving it out of TOML, which has no null, says the same."""
    wrong = [
        f"{table}.{name}"
        for table, section in sections().items()
        for name, info in section.model_fields.items()
        if "None" in str(info.annotation) and (info.is_required() or info.default is not None)
    ]
    assert wrong == []


def test_the_defaults_are_the_papers():
    recipe = Recipe()
    assert recipe.algorithm.name == "gspo"
    assert recipe.optim.updates_per_step == 4
    assert recipe.algorithm.epsilon is None  # the catalogue's: 3e-4 and 4e-4
    assert recipe.algorithm.beta is None  # the catalogue's: 0


def test_sections_are_frozen_and_refuse_unknown_names():
    with pytest.raises(ValidationError):
        RolloutConfig(num_generation=4)
    with pytest.raises(ValidationError):
        Recipe().rollout.num_generations = 4


def documented_options() -> dict[str, dict[str, str]]:
    """Section class -> option -> its text in config.py."""
    tree = ast.parse(Path(gspo.config.__file__).read_text(encoding="utf-8"))
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for item, following in zip(node.body, node.body[1:], strict=False):
                if isinstance(item, ast.AnnAssign) and isinstance(following, ast.Expr):
                    text = " ".join(ast.literal_eval(following.value).split())
                    found.setdefault(node.name, {})[item.target.id] = text.replace("``", "`")
    return found


def default_of(info) -> str:
    """A default as a recipe would say it; a dash where there is none."""
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    if default is None or isinstance(default, Section):
        return "-"
    return f"`{toml_value(default, '')}`"


def rows() -> dict[str, list[str]]:
    """The rows of docs/configuration.md by section."""
    texts = documented_options()
    return {
        name: [
            f"| `{option}` | {default_of(info)} | {texts[section.__name__][option]} |"
            for option, info in section.model_fields.items()
        ]
        for name, section in sections().items()
    }


@pytest.mark.parametrize("name", OPTIONS)
def test_the_documented_options_are_the_code(name):
    page = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text(encoding="utf-8")
    part = page.split(f"\n## `[{name}]`", 1)[-1] if name != "rewards" else page.split("\n## `[[rewards]]`", 1)[-1]
    table = [line for line in part.split("\n## ")[0].splitlines() if line.startswith("| `")]
    assert table == rows()[name]
