"""Stop strings, found in the text of the tokens as they are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BYTES_PER_CHARACTER = 4  # a token may hold a single byte of a UTF-8 character
_MARGIN = 8


class StopWatch:
    """Watches one completion for its stop strings.

    Only a window is decoded: enough tokens to hold the longest stop string even at one byte a token, and
    some more, since decoders treat the first token of a text specially. Special tokens are part of the text,
    so a stop string may name one. Text before the request's own tokens is not looked at.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._window = max(map(len, stops)) * _BYTES_PER_CHARACTER + _MARGIN
        self._recent: list[int] = []

    def push(self, token_id: int) -> bool:
        """Take the next token; whether a stop string is complete now."""
        self._recent = [*self._recent, token_id][-self._window :]
        text = self._tokenizer.decode(self._recent, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._stops)
