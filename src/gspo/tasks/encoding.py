"""From prompts to token ids, with a tokenizer that is passed in.

Exactly one beginning-of-sequence token, ids encoded once and never decoded or encoded again: a prompt that is
too long is dropped or refused, not cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from gspo.errors import ModelError, TaskError
from gspo.tasks.task import Overlong, Task
from gspo.types import IntArray, Prompt

ChatMode = Literal["auto", "always", "never"]
_OURS = (
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "return_tensors",
    "return_dict",
)
_CHUNK = 1024


class Tokenizer(Protocol):
    """What encoding asks of a tokenizer; every Hugging Face tokenizer has it."""

    bos_token_id: int | None
    chat_template: Any

    def __call__(self, text: Any, *, add_special_tokens: bool) -> Any:
        """Encode a string or a list of strings; ``["input_ids"]`` of the result is read."""
        ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render chat turns."""
        ...


def encode_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer,
    *,
    chat_template: ChatMode = "auto",
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> IntArray:
    """Token ids of a prompt, [P] int64, ready to be continued.

    Text goes through the chat template as a user's turn where the tokenizer has one (``auto``), always, or
    never; messages always need one. The template's word on special tokens is final; plain text gets the
    beginning-of-sequence token where the tokenizer adds one. A repeated one at the front is dropped. Other
    special tokens that a tokenizer appends (end of sequence) are not added. A last assistant turn is
    continued. Raises ModelError where a template is needed and missing, or fails.
    """
    rendered = _render(prompt, tokenizer, chat_template, chat_template_kwargs or {})
    return _encode([rendered], tokenizer)[0]


def encode_task(
    task: Task,
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int | None = None,
    overlong: Literal["drop", "error"] = "drop",
    chat_template: ChatMode = "auto",
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Task:
    """The task with ``ids`` filled; prompts beyond ``max_prompt_length`` tokens are dropped and counted, or an
    error.

    TaskError where none fits or ``overlong`` is "error", naming the first ids and lengths; ModelError as in
    ``encode_prompt``, and where a prompt has no token at all.
    """
    ids: dict[str, IntArray] = {}
    too_long: list[Overlong] = []
    for start in range(0, len(task), _CHUNK):
        chunk = task.prompts[start : start + _CHUNK]
        rendered = [_render(p, tokenizer, chat_template, chat_template_kwargs or {}) for p in chunk]
        for prompt, encoded in zip(chunk, _encode(rendered, tokenizer), strict=True):
            if max_prompt_length is not None and len(encoded) > max_prompt_length:
                too_long.append(Overlong(prompt.id, len(encoded)))
            else:
                ids[prompt.id] = encoded
    if too_long and (overlong == "error" or not ids):
        raise TaskError(_overlong_message(task, too_long, max_prompt_length))
    if not too_long:
        return replace(task, ids=ids)
    note = f"{len(too_long)} of {len(task)} prompts have more than {max_prompt_length} tokens: dropped"
    report = replace(task.report, overlong=tuple(too_long), notes=(*task.report.notes, note))
    kept = tuple(prompt for prompt in task.prompts if prompt.id in ids)
    return Task(task.name, kept, report, ids)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A prompt as one string, and whether the tokenizer's own special tokens belong before it."""

    prompt_id: str
    text: str
    plain: bool


def _render(prompt: Prompt, tokenizer: Tokenizer, mode: ChatMode, template_kwargs: Mapping[str, Any]) -> _Rendered:
    if mode not in ("auto", "always", "never"):
        raise ModelError(f'chat_template = {mode!r}; valid: "auto", "always", "never"')
    if prompt.text is not None and (mode == "never" or (mode == "auto" and not tokenizer.chat_template)):
        return _Rendered(prompt.id, prompt.text, plain=True)
    if mode == "never":
        raise ModelError(
            f'prompt {prompt.id!r} holds chat messages, and chat_template = "never": leave it at "auto", '
            f"or put the system text into prompt_template instead of system_prompt"
        )
    if not tokenizer.chat_template:
        raise ModelError(
            f"prompt {prompt.id!r} needs a chat template and the tokenizer has none. Give one "
            f"(model.chat_template), use plain text prompts "
            f'(chat_template = "auto" or "never"), or an instruction-tuned model; a system text can stand in '
            f" prompt_template instead of system_prompt"
        )
    messages = prompt.messages or ({"role": "user", "content": prompt.text or ""},)
    return _Rendered(prompt.id, _apply(messages, tokenizer, template_kwargs, prompt.id), plain=False)


def _apply(
    messages: Sequence[Mapping[str, str]],
    tokenizer: Tokenizer,
    template_kwargs: Mapping[str, Any],
    prompt_id: str,
) -> str:
    import jinja2

    reserved = [name for name in template_kwargs if name in _OURS]
    if reserved:
        raise ModelError(f"chat_template_kwargs may not set {', '.join(reserved)}: the library sets it")
    prefilled = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            [dict(turn) for turn in messages],
            tokenize=False,
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            **template_kwargs,
        )
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise ModelError(f"the chat template fails on prompt {prompt_id!r}: {error}") from error
    return str(text)


def _encode(rendered: Sequence[_Rendered], tokenizer: Tokenizer) -> list[IntArray]:
    """Ids of each text with exactly one beginning-of-sequence token where one belongs."""
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and list(tokenizer("a", add_special_tokens=True)["input_ids"])[:1] == [bos]
    encoded = tokenizer([item.text for item in rendered], add_special_tokens=False)["input_ids"]
    result = []
    for item, token_ids in zip(rendered, encoded, strict=True):
        ids = list(token_ids)
        while len(ids) > 1 and ids[0] == ids[1] == bos:
            ids.pop(0)
        if item.plain and adds_bos and ids[:1] != [bos]:
            ids.insert(0, bos)
        if not ids:
            raise ModelError(f"prompt {item.prompt_id!r} ({item.text[:40]!r}) has no token in this tokenizer")
        result.append(np.asarray(ids, dtype=np.int64))
    return result


def _overlong_message(task: Task, too_long: Sequence[Overlong], limit: int | None) -> str:
    first = ", ".join(f"{item.id} ({item.length})" for item in too_long[:5])
    longest = max(item.length for item in too_long)
    return (
        f"task {task.name!r}: {len(too_long)} of {len(task)} prompts are longer than max_prompt_length = "
        f"{limit} tokens: {first}{', ...' if len(too_long) > 5 else ''}. The longest has {longest}: raise "
        f'max_prompt_length to that, or drop them with overlong_prompts = "drop"'
    )
