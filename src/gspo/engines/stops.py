"""Stop strings, found in the text of the tokens as they are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BYTES_PER_CHARACTER = 4  # a token may hold a single byte of a UTF-8 character
_MARGIN = 8
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoders write for a piece of a character


class TokenTexts:
    """A tokenizer's decoder, special tokens included, that remembers the text of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._single: dict[int, str] = {}

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of several tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def single(self, token_id: int) -> str:
        """The text of one token on its own; decoders may drop its leading space."""
        if token_id not in self._single:
            self._single[token_id] = self.text([token_id])
        return self._single[token_id]


class StopWatch:
    """Watches one completion for its stop strings.

    Only a window is decoded: enough tokens to hold the longest stop string even at one byte a token, and some
    more, since decoders treat the first token of a text specially. Special tokens are part of the text, so a stop
    string may name one. Text before the request's own tokens is not looked at.
    """

    def __init__(self, texts: TokenTexts, stops: Sequence[str]) -> None:
        self._texts = texts
        self._stops = tuple(stops)
        self._lasts = {stop[-1] for stop in stops}
        self._spaced = any(last.isspace() for last in self._lasts)
        self._window = max(map(len, stops)) * _BYTES_PER_CHARACTER + _MARGIN
        self._recent: list[int] = []

    def push(self, token_id: int) -> bool:
        """Take the next token; whether it completes a stop string."""
        self._recent = [*self._recent, token_id][-self._window :]
        if not self._may_complete(self._texts.single(token_id)):
            return False
        text = self._texts.text(self._recent)
        return any(stop in text for stop in self._stops)

    def _may_complete(self, text: str) -> bool:
        """Whether a token can hold a stop string's last character; saves decoding the window at most tokens."""
        if self._spaced or not text or _UNFINISHED in text:
            return True
        return not self._lasts.isdisjoint(text)
