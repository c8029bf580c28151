"""What the tests of the prose share: code blocks of a page, and a model small enough for milliseconds."""

from __future__ import annotations

import re
import string
from pathlib import Path

import torch

from gspo.config import ColdStartConfig
from gspo.policy.model import Policy
from gspo.training.coldstart import character_tokenizer, tiny_model

ROOT = Path(__file__).resolve().parents[1]


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def make_model(folder: Path, context: int = 512) -> None:
    """A Qwen3 of a few thousand random weights that reads printable ASCII."""
    config = ColdStartConfig(hidden_size=16, num_layers=1, num_heads=2, max_length=context)
    tokenizer = character_tokenizer(sorted(set(string.printable) - set("\t\r\x0b\x0c")), context)
    torch.manual_seed(0)
    Policy(tiny_model(config, len(tokenizer), tokenizer.eos_token_id), tokenizer).save(folder)
