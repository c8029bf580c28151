"""Token ids of prompts: one beginning of sequence, templates, prompts too long."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from gspo.errors import ModelError, TaskError
from gspo.tasks import TaskOptions, encode_prompt, encode_task, load_task
from gspo.types import Prompt

SPECIALS = ["<pad>", "<bos>", "<eos>", "<user>", "<model>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "
BOS, EOS, USER, MODEL = 1, 2, 3, 4
CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<user>{% elif m.role == 'assistant' %}<model>"
    "{% else %}s{% endif %}{{ m.content }}{% endfor %}{% if think %}t{% endif %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)


def tokenizer(*, adds: str = "", chat: str | None = None) -> PreTrainedTokenizerFast:
    """Characters are tokens. ``adds``: "bos", "bos eos" or "eos" are put around by the tokenizer itself."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *LETTERS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    if adds:
        single = " ".join(["<bos>"] * ("bos" in adds) + ["$A"] + ["<eos>"] * ("eos" in adds))
        raw.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=["<user>", "<model>"],
    )
    made.chat_template = chat
    return made


def ids(text: str) -> list[int]:
    return [len(SPECIALS) + LETTERS.index(letter) for letter in text]


def text(content: str) -> Prompt:
    return Prompt(id="p", text=content)


def chat(*turns: tuple[str, str]) -> Prompt:
    return Prompt(id="p", messages=tuple({"role": role, "content": content} for role, content in turns))


@pytest.mark.parametrize("adds", ["bos", "bos eos"])
@pytest.mark.parametrize("content", ["ab", "<bos>ab", "<bos><bos>ab"])
def test_text_gets_exactly_one_bos(adds, content):
    encoded = encode_prompt(text(content), tokenizer(adds=adds))
    assert encoded.dtype == np.int64
    assert encoded.tolist() == [BOS, *ids("ab")]


@pytest.mark.parametrize("adds", ["", "bos", "bos eos", "eos"])
def test_chat_that_writes_its_bos_gets_exactly_one(adds):
    encoded = encode_prompt(chat(("user", "ab")), tokenizer(adds=adds, chat=CHAT))
    assert encoded.tolist() == [BOS, USER, *ids("ab"), MODEL]


def test_a_template_written_twice_leaves_one_bos():
    doubled = "{{ bos_token }}" + CHAT
    assert encode_prompt(text("a"), tokenizer(adds="bos", chat=doubled)).tolist() == [BOS, USER, *ids("a"), MODEL]


@pytest.mark.parametrize("adds", ["", "eos"])
def test_no_special_token_is_invented(adds):
    assert encode_prompt(text("ab"), tokenizer(adds=adds)).tolist() == ids("ab")
    without_bos = CHAT.removeprefix("{{ bos_token }}")
    assert encode_prompt(text("a"), tokenizer(adds="bos", chat=without_bos)).tolist() == [USER, *ids("a"), MODEL]


def test_a_bos_inside_the_text_stays():
    assert encode_prompt(text("a<bos><bos>b"), tokenizer(adds="bos")).tolist() == [BOS, *ids("a"), BOS, BOS, *ids("b")]


def test_modes_of_the_chat_template():
    plain, instructed = tokenizer(adds="bos"), tokenizer(adds="bos", chat=CHAT)
    assert encode_prompt(text("a"), plain).tolist() == [BOS, *ids("a")]
    assert encode_prompt(text("a"), instructed).tolist() == [BOS, USER, *ids("a"), MODEL]
    assert encode_prompt(text("a"), instructed, chat_template="always").tolist() == [BOS, USER, *ids("a"), MODEL]
    assert encode_prompt(text("a"), instructed, chat_template="never").tolist() == [BOS, *ids("a")]


def test_template_arguments_and_a_begun_answer():
    instructed = tokenizer(chat=CHAT)
    encoded = encode_prompt(text("a"), instructed, chat_template_kwargs={"think": True})
    assert encoded.tolist() == [BOS, USER, *ids("at"), MODEL]
    begun = encode_prompt(chat(("user", "a"), ("assistant", "b")), instructed)
    assert begun.tolist() == [BOS, USER, *ids("a"), MODEL, *ids("b")]


@pytest.mark.parametrize(
    ("prompt", "template", "options", "message"),
    [
        (chat(("system", "s"), ("user", "a")), None, {}, "needs a chat template and the tokenizer has none"),
        (text("a"), None, {"chat_template": "always"}, "needs a chat template and the tokenizer has none"),
        (chat(("user", "a")), CHAT, {"chat_template": "never"}, 'chat_template = "never"'),
        (text("a"), CHAT, {"chat_template": "sometimes"}, 'valid: "auto", "always", "never"'),
        (text("a"), CHAT, {"chat_template_kwargs": {"tokenize": True}}, "may not set tokenize"),
        (text("a"), "{{ raise_exception('no such role') }}", {}, "fails on prompt 'p': no such role"),
        (text("a"), "{% if %}", {}, "fails on prompt 'p'"),
        (text(""), None, {}, "has no token"),
    ],
)
def test_refusals(prompt, template, options, message):
    with pytest.raises(ModelError, match=message):
        encode_prompt(prompt, tokenizer(chat=template), **options)


def task_of(*texts: str):
    return load_task(TaskOptions([{"id": t, "prompt": t, "answer": 1} for t in texts], name="letters"))


def test_prompts_too_long_are_dropped_and_counted():
    # "abcdefghi" with its beginning of sequence is 10 tokens
    task = encode_task(task_of("ab", "abcdefghi", "abcdefg"), tokenizer(adds="bos"), max_prompt_length=8)
    assert [p.id for p in task.prompts] == ["ab", "abcdefg"]
    assert {name: encoded.tolist() for name, encoded in task.ids.items()} == {
        "ab": [BOS, *ids("ab")],
        "abcdefg": [BOS, *ids("abcdefg")],
    }
    assert [(o.id, o.length) for o in task.report.overlong] == [("abcdefghi", 10)]
    assert task.report.notes == ("1 of 3 prompts have more than 8 tokens: dropped",)
    assert len(task.batch(0, 2, seed=0)) == 2


def test_prompts_too_long_may_be_an_error():
    with pytest.raises(TaskError, match=r"1 of 2 prompts.*max_prompt_length = 8 tokens: abcdefghi \(10\).*has 10"):
        encode_task(task_of("ab", "abcdefghi"), tokenizer(adds="bos"), max_prompt_length=8, overlong="error")
    with pytest.raises(TaskError, match="1 of 1 prompts"):
        encode_task(task_of("abcdefghi"), tokenizer(), max_prompt_length=8)


def test_without_a_limit_everything_fits():
    task = encode_task(task_of("ab", "abcdefghi"), tokenizer())
    assert (len(task), set(task.ids), task.report.overlong) == (2, {"ab", "abcdefghi"}, ())


@given(st.lists(st.text(LETTERS, min_size=1, max_size=20).filter(str.strip), min_size=1, max_size=8, unique=True))
def test_a_task_is_encoded_as_its_prompts_one_by_one(texts):
    task = task_of(*texts)
    encoded = encode_task(task, TOKENIZER)
    for prompt in task.prompts:
        assert encoded.ids[prompt.id].tolist() == encode_prompt(prompt, TOKENIZER).tolist()


TOKENIZER = tokenizer(adds="bos", chat=CHAT)
