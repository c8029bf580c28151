"""``gspo show``: read in the terminal what the model wrote. Model text is printed harmless, never interpreted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from gspo.cli.run_folder import read_jsonl, require_run_folder, rollout_files, safe_text
from gspo.errors import ConfigError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Arguments:
    """Read what the model wrote."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    step: int | None = None
    """The step; the newest by default."""
    best: int | None = None
    """Show the N rollouts with the highest reward."""
    worst: int | None = None
    """Show the N rollouts with the lowest reward."""
    eval: bool = False
    """Read the held-out evaluation instead of the training rollouts."""
    full: bool = False
    """Show whole texts; by default the first 1,500 characters of each."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Print a summary of the step and the chosen rollouts."""
    path, step = choose_file(arguments)
    rows = read_jsonl(path)
    if not rows:
        raise ConfigError(f"{path} holds no rollouts")
    print(summary(rows, step, evaluation=arguments.eval))
    limit = None if arguments.full else 1500
    for title, chosen in choose_rows(rows, arguments.best, arguments.worst):
        for number, row in enumerate(chosen, start=1):
            print(f"\n{'=' * 20} {title} {number} of {len(chosen)}\n{describe(row, limit)}")
    return 0


def choose_file(arguments: Arguments) -> tuple[Path, int]:
    """(file, step). Raises ConfigError that names the steps there are."""
    kind = "evaluations" if arguments.eval else "rollouts"
    files = rollout_files(require_run_folder(arguments.run), evaluation=arguments.eval)
    if not files:
        raise ConfigError(f"{arguments.run} has no {kind} yet")
    step = max(files) if arguments.step is None else arguments.step
    if step not in files:
        near = sorted(files, key=lambda number: (abs(number - step), number))[:3]
        known = f"there are {len(files)}, from {min(files)} to {max(files)}"
        raise ConfigError(f"no {kind} of step {step}; {known}; nearest: {', '.join(map(str, sorted(near)))}")
    return files[step], step


def choose_rows(rows: Sequence[Row], best: int | None, worst: int | None) -> list[tuple[str, Sequence[Row]]]:
    """What to show: two best and two worst where nothing was asked for. Ungraded rollouts count as neither."""
    if best is None and worst is None:
        best = worst = 2
    graded = [row for row in rows if isinstance(row.get("reward"), (int, float))]
    if not graded:
        return [("ungraded", rows[: max(best or 0, worst or 0)])]
    ascending = sorted(graded, key=lambda row: row["reward"])
    descending = sorted(graded, key=lambda row: -row["reward"])
    chosen = [("best", descending[: best or 0]), ("worst", ascending[: worst or 0])]
    return [(title, part) for title, part in chosen if part]


def summary(rows: Sequence[Row], step: int, *, evaluation: bool = False) -> str:
    """One line: how many, mean reward, share truncated, mean length, how many ungraded and why."""
    rewards = [row["reward"] for row in rows if isinstance(row.get("reward"), (int, float))]
    truncated = sum(row.get("finish_reason") in ("length", "context_length") for row in rows)
    words = [f"{'evaluation at step' if evaluation else 'step'} {step}: {len(rows)} rollouts"]
    if rewards:
        words.append(f"mean reward {sum(rewards) / len(rewards):.4g}")
    words.append(f"{truncated / len(rows):.0%} truncated")
    words.append(f"mean length {sum(row.get('tokens') or 0 for row in rows) / len(rows):.4g} tokens")
    reasons: dict[str, int] = {}
    for row in rows:
        if not isinstance(row.get("reward"), (int, float)):
            reason = str(row.get("grading"))
            reasons[reason] = reasons.get(reason, 0) + 1
    words += [f"{count} {safe_text(reason)}" for reason, count in sorted(reasons.items())]
    return ", ".join(words)


def describe(row: Row, limit: int | None) -> str:
    """One rollout: a line of facts, prompt, reference answer, and what the model wrote."""
    reward = row.get("reward")
    facts = [f"reward {reward:.4g}" if isinstance(reward, (int, float)) else f"{row.get('grading')}, no reward"]
    parts = row.get("parts") or {}
    facts += [
        f"{name} {value:.4g}" if isinstance(value, (int, float)) else f"{name} -" for name, value in parts.items()
    ]
    if isinstance(row.get("advantage"), (int, float)):
        facts.append(f"advantage {row['advantage']:+.3g}")
    facts.append(f"{row.get('tokens')} tokens, {row.get('finish_reason')}")
    facts.append(f"prompt {row.get('prompt_id')}, rollout {row.get('index')}, version {row.get('version')}")
    lines = [safe_text(" | ".join(facts)), _block("prompt", prompt_text(row.get("prompt")), limit)]
    if row.get("answer") is not None:
        lines.append(_block("answer", str(row["answer"]), limit))
    lines.append(_block("text", str(row.get("text", "")), limit))
    if row.get("grading_error"):
        lines.append(_block("error", str(row["grading_error"]), limit))
    return "\n".join(lines)


def prompt_text(prompt: Any) -> str:
    """A prompt as text: chat turns are written "role: content"."""
    if isinstance(prompt, list):
        return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt if isinstance(turn, dict))
    return "" if prompt is None else str(prompt)


def _block(title: str, text: str, limit: int | None) -> str:
    cut = "" if limit is None or len(text) <= limit else f"\n... {len(text) - limit} more characters (--full)"
    shown = safe_text(text if limit is None else text[:limit]) + cut
    return f"--- {title}\n{shown}"
