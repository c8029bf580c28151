"""The errors a user can meet. Every message says what happened, where, and what to try."""

from __future__ import annotations


class GspoError(Exception):
    """Base of all errors raised on purpose by this library."""


class ConfigError(GspoError):
    """The recipe or the command line is wrong: unknown key, option that means nothing, impossible sizes."""


class TaskError(GspoError):
    """A task cannot be read: missing file or column, rows without answer, prompt too long."""


class RewardError(GspoError):
    """A reward function cannot be used: not found, wrong signature, wrong return in every call."""


class ModelError(GspoError):
    """A model or tokenizer cannot be used: missing, nothing trainable, no chat template."""


class NumericsError(GspoError):
    """A non-finite loss, gradient, log-prob or weight; raised before the weights change."""


class CheckpointError(GspoError):
    """A checkpoint is missing, damaged or of another run."""


class EngineError(GspoError):
    """An engine was used wrongly or refused a set of weights."""


class EngineDied(EngineError):
    """An engine ended and cannot be used any more."""


class MissingExtra(GspoError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, what: str) -> None:
        super().__init__(f'{what} needs the package "{package}": pip install "gspo[{extra}]" (or {package})')
