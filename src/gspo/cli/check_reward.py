"""``gspo check reward``: a reward function tried on completions, in a worker process as a run does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from gspo.cli.run_folder import safe_text
from gspo.errors import ConfigError
from gspo.recipe import load_recipe


@dataclass(frozen=True)
class Arguments:
    """Try a reward function."""

    function: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FUNCTION")]
    """A built-in ("math", "exact", "format" ...) or "module:function" of yours."""
    completions: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="COMPLETION")]
    """What the model might write, one word of the command line each. Best a right, a wrong and an empty one."""
    answer: str | None = None
    """The reference answer."""
    prompt: str = ""
    """The prompt."""
    signature: Literal["gspo", "trl"] = "gspo"
    """gspo: f(rollout); trl: f(prompts=, completions=, **columns)."""
    options: str = "{}"
    """Keyword arguments of the function as a TOML table: '{ marker = "#" }'."""
    timeout_s: float = 10.0
    """Deadline of one call."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Grade each completion twice; prints verdicts and problems; 1 where there is a problem."""
    if not arguments.completions:
        raise ConfigError(f'give a completion to grade: gspo check reward {arguments.function} "..." --answer "..."')
    entry = {"function": arguments.function, "signature": arguments.signature}
    reward = load_recipe({"rewards": [entry]}, ["--rewards.0.options", arguments.options]).rewards[0]
    from gspo.rewards import RewardSpec, check_reward, example

    spec = RewardSpec(reward.function, 1.0, reward.signature, reward.options)
    examples = [example(text, prompt=arguments.prompt, answer=arguments.answer) for text in arguments.completions]
    report = check_reward(spec, examples, timeout_s=arguments.timeout_s)
    print(safe_text(str(report)))
    return 0 if report.ok else 1
