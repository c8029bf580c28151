"""The ``gspo`` command: finds the chosen command's file, parses its words, turns errors into one clear line.

Each command is one file with ``Arguments`` (a dataclass) and ``run(arguments, overrides) -> int``. Only the
chosen one is imported and only its parser is built, so ``gspo --help`` answers without torch.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence

from gspo import __version__
from gspo.cli.command import Command
from gspo.errors import ConfigError, GspoError

COMMANDS: Mapping[str, Command] = {
    "train": Command("train", "train a model from a recipe", overrides=True),
    "resume": Command("resume", "continue a run from its newest checkpoint"),
    "eval": Command("evaluate", "evaluate a recipe's model or a run on its held-out task", overrides=True),
    "coldstart": Command("coldstart", "fine-tune or build the starting model of a recipe", overrides=True),
    "init": Command("init", "write a recipe for your own data"),
    "recipes": Command("recipes", "list the recipes that come with the package"),
    "show": Command("show", "read what the model wrote"),
    "plot": Command("plot", "draw a run's curves as a PNG"),
    "calibrate": Command("calibrate", "measure a recipe's ratios and propose its clip range", overrides=True),
    "check reward": Command("check_reward", "try a reward function on one answer"),
    "check task": Command("check_task", "load a task and show what its rows become", overrides=True),
    "check engine": Command("check_engine", "compare a recipe's engine with its learner", overrides=True),
    "check recipe": Command("check_recipe", "one real group and one update", overrides=True),
    "doctor": Command("doctor", "what this machine has, lacks, and what is untested"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 (error), 2 (wrong recipe or words), 130 (interrupt)."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a sign must not end a run
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (GspoError, OSError) as error:
        if os.environ.get("GSPO_TRACEBACK") == "1":
            raise
        print(format_error(error, colour=_colour(sys.stderr)), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"gspo {__version__}")
        return 0
    name, rest = _command_name(words)
    command = COMMANDS[name]
    if "OMP_WAIT_POLICY" not in os.environ:
        # Read when torch is loaded. OpenMP's threads wait by spinning: beside another program on the same cores a
        # small model's step takes ten times as long. These sleep after some microseconds.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # "my_rewards:score" in a recipe means a file beside the user
    module = importlib.import_module(f"gspo.cli.{command.module}")
    from gspo.cli.arguments import parse

    arguments, overrides = parse(module.Arguments, rest, name=name, command=command)
    return int(module.run(arguments, overrides))


def _command_name(words: list[str]) -> tuple[str, list[str]]:
    """The command and the words after it; ``check`` is followed by what to check."""
    pair = " ".join(words[:2])
    if pair in COMMANDS:
        return pair, words[2:]
    if words[0] in COMMANDS:
        return words[0], words[1:]
    group = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    if group and words[1:2] in ([], ["-h"], ["--help"]):
        raise ConfigError(f"gspo {words[0]}: say what to check\n{_listing(group)}")
    import difflib

    near = difflib.get_close_matches(pair if group else words[0], group or COMMANDS, n=1)
    hint = f'did you mean "gspo {near[0]}"?' if near else 'see "gspo --help"'
    raise ConfigError(f'"{pair if group else words[0]}" is no command; {hint}')


def overview() -> str:
    """The text of ``gspo --help``."""
    return (
        f"gspo {__version__}: post-train language models by reinforcement learning with GSPO\n\n"
        f"usage: gspo COMMAND ...\n\n{_listing(list(COMMANDS))}\n\n"
        'Start with "gspo train quickstart". "gspo COMMAND --help" explains a command; every option of a\n'
        "recipe can be given as --section.option value. GSPO_TRACEBACK=1 shows where an error comes from."
    )


def _listing(names: Sequence[str]) -> str:
    width = max(len(name) for name in names)
    return "\n".join(f"  {name:<{width}}  {COMMANDS[name].summary}" for name in names)


def format_error(error: BaseException, *, colour: bool) -> str:
    """``error: what happened`` with the first line in red, and what to try below it.

    An error may quote what a model wrote, so it is made harmless for the terminal too.
    """
    from gspo.cli.run_folder import safe_text

    first, _, rest = safe_text(str(error) or type(error).__name__).partition("\n")
    head = f"\x1b[31merror: {first}\x1b[0m" if colour else f"error: {first}"
    return f"{head}\n{rest}" if rest else head


def _colour(stream: object) -> bool:
    return isinstance(stream, io.TextIOWrapper) and stream.isatty() and "NO_COLOR" not in os.environ
