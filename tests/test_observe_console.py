"""What the terminal shows: narrow, plain where it must be, and deaf to what a model wrote."""

from __future__ import annotations

import io
import unicodedata
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gspo.observe.console import ConsoleTracker, duration, neutral, settings_table, show_samples
from gspo.types import FinishReason, Grading, Prompt, Rollout, StepReport, TokenRow

STEP = {
    "reward": 0.5,
    "clip/sequence": 0.123,
    "completions/mean_length": 1234.0,
    "completions/num_tokens": 12345.0,
}


def console(*, terminal: bool = False, width: int = 80, encoding: str = "utf-8", color: bool = False) -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    return Console(
        file=file,
        width=width,
        force_terminal=terminal,
        no_color=not color,
        color_system="truecolor" if color else None,
        legacy_windows=False,
        _environ={},
    )


def text(of: Console) -> str:
    file = of.file
    assert isinstance(file, io.TextIOWrapper)
    assert isinstance(file.buffer, io.BytesIO)
    return file.buffer.getvalue().decode(file.encoding)


def rollout(written: str, reward: float | None = 0.0, prompt: str = "2 + 2?", name: str = "a") -> Rollout:
    row = TokenRow(np.zeros(3, np.int64), np.ones(3, np.bool_), np.zeros(3, np.float32), np.zeros(3, np.int64))
    grading = Grading.GRADED if reward is not None else Grading.TIMEOUT
    return Rollout(Prompt(name, text=prompt), 0, (row,), FinishReason.STOP, written, reward, {}, grading)


def lines(*reports: StepReport, steps: int = 100, **options: int) -> list[str]:
    out = console()
    with ConsoleTracker(steps, console=out, **options) as tracker:
        for report in reports:
            tracker.log(report)
    return text(out).splitlines()


class TestProgress:
    def test_a_step_is_one_line_of_at_most_80_characters(self) -> None:
        reports = [
            StepReport(step, step + 1, {**STEP, "eval/accuracy": 0.3}, {"rollout": 0.5, "update": 0.3})
            for step in (0, 1)
        ]
        shown = lines(*reports, steps=1000)
        assert shown[1] == "   2/1000 reward 0.500 held-out 0.300 clip 0.12 len 1.2k 15.4k tok/s ETA 13m18s"
        assert max(map(len, shown)) <= 80

    def test_an_evaluation_has_a_line_of_its_own_and_stays_in_sight(self) -> None:
        metrics = {"eval/accuracy": 0.25, "eval/accuracy_se": 0.01, "eval/items": 1000.0}
        first, second = lines(StepReport(0, 0, metrics), StepReport(0, 1, STEP))
        assert first == "  0/100 held-out 0.250 +/- 0.010 on 1000 items"
        assert "held-out 0.250" in second

    def test_what_was_not_measured_is_a_dash(self) -> None:
        (line,) = lines(StepReport(0, 1, {"completions/count": 4.0}))
        assert line == "  1/100 reward - held-out - clip - ETA -"

    def test_every_tenth_step_where_the_output_is_no_terminal(self) -> None:
        noted = StepReport(5, 6, STEP, notes=("out of memory",))
        reports = [StepReport(step, step + 1, STEP) for step in range(20)]
        shown = lines(*[noted if report.step == 5 else report for report in reports], steps=20, every=10)
        assert [line.split("/")[0].strip() for line in shown if "/20" in line] == ["1", "6", "11", "20"]
        assert "  note: out of memory" in shown

    def test_a_terminal_gets_a_bar_and_every_line(self) -> None:
        out = console(terminal=True)
        with ConsoleTracker(4, console=out, every=10) as tracker:
            for step in range(3):
                tracker.log(StepReport(step, step + 1, STEP, {"rollout": 1.0}))
        assert all(f"{step}/4 reward" in text(out) for step in (1, 2, 3))
        assert "3/4 ETA 1s" in text(out)
        assert text(out).count("\x1b[?25l") == text(out).count("\x1b[?25h") == 1

    def test_the_cursor_comes_back_after_an_error(self) -> None:
        out = console(terminal=True)
        with pytest.raises(RuntimeError), ConsoleTracker(4, console=out):
            raise RuntimeError
        assert text(out).count("\x1b[?25h") == 1

    def test_a_note_is_plain(self) -> None:
        shown = lines(StepReport(0, 1, STEP, notes=("[red]\x1b[2Jgone",)))
        assert "  note: [red]\\x1b[2Jgone" in shown

    @pytest.mark.parametrize(
        ("seconds", "words"),
        [(0, "0s"), (59.4, "59s"), (60, "1m00s"), (3599, "59m59s"), (7500, "2h05m"), (273600, "3d04h")],
    )
    def test_durations(self, seconds: float, words: str) -> None:
        assert duration(seconds) == words


class TestSettings:
    ROWS = (
        ("clip range", "[-0.0003, +0.0004]", "nats a token, averaged over a sequence; " * 4),
        ("rollouts per step", "128", "16 prompts × 8 completions"),
    )

    @pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
    def test_a_table_of_80_columns_in_any_encoding(self, encoding: str) -> None:
        out = console(encoding=encoding)
        settings_table(self.ROWS, console=out)
        shown = text(out).splitlines()
        assert max(map(len, shown)) <= 80
        assert shown[0].strip() == "What the settings mean"
        assert any("[-0.0003, +0.0004]" in line for line in shown)

    def test_no_color(self) -> None:
        plain, colored = console(terminal=True), console(terminal=True, color=True)
        settings_table(self.ROWS, console=plain)
        settings_table(self.ROWS, console=colored)
        assert "\x1b[36m" in text(colored)
        assert "\x1b[36m" not in text(plain)


class TestSamples:
    def test_side_by_side(self) -> None:
        out = console()
        show_samples([rollout("five", 0.0)], [rollout("four", 1.0)], console=out)
        shown = text(out)
        assert "Prompt: 2 + 2?" in shown
        assert any("five" in line and "four" in line for line in shown.splitlines())
        assert "before (reward 0.00)" in shown and "after (reward 1.00)" in shown

    def test_samples_meet_by_prompt_not_by_position(self) -> None:
        out = console()
        before = [rollout("A1", name="a"), rollout("B1", name="b"), rollout("C1", name="c")]
        after = [rollout("B2", name="b"), rollout("A2", name="a")]
        show_samples(before, after, console=out)
        rows = [line for line in text(out).splitlines() if "1 " in line and "2 " in line and "Prompt" not in line]
        assert [("A1" in row and "A2" in row, "B1" in row and "B2" in row) for row in rows] == [
            (True, False),
            (False, True),
        ]
        assert "C1" not in text(out)

    def test_what_a_model_wrote_is_only_text(self) -> None:
        out = console(terminal=True, color=True)
        evil = "[red]no[/red] [/] \x1b[2J\x1b]0;title\x07 \u202eback \r over \ud800"
        show_samples([rollout(evil, prompt=evil)], [rollout(evil)], console=out)
        shown = text(out)
        assert "[red]no[/red] [/]" in shown
        for bad in ("\x1b[2J", "\x1b]0", "\x07", "\u202e", "\r", "\ud800"):
            assert bad not in shown

    def test_long_texts_are_cut_and_say_so(self) -> None:
        out = console()
        show_samples([rollout("x" * 700)], [rollout("y")], console=out)
        assert "x" * 601 not in text(out).replace("\n", "")
        assert "[100 more characters]" in " ".join(text(out).split())

    def test_verdicts(self) -> None:
        out = console(width=120)
        cut = replace(rollout("a"), finish_reason=FinishReason.LENGTH)
        show_samples([cut], [rollout("b", None)], console=out)
        assert "before (reward 0.00, cut)" in text(out) and "after (timeout)" in text(out)

    def test_chat_prompts_show_the_last_message(self) -> None:
        out = console()
        chat = Prompt("a", messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi?"}))
        show_samples([replace(rollout("x"), prompt=chat)], [rollout("y")], console=out)
        assert "Prompt: hi?" in text(out)


class TestNeutral:
    @given(st.text(st.characters()))
    def test_nothing_that_a_terminal_acts_on_is_left(self, given_text: str) -> None:
        left = {unicodedata.category(c) for c in neutral(given_text) if c not in "\n\u200c\u200d"}
        assert not left & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
        neutral(given_text).encode("utf-8")

    @given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"])))
    def test_ordinary_text_is_left_alone(self, given_text: str) -> None:
        assert neutral(given_text) == given_text

    def test_by_hand(self) -> None:
        assert neutral("a\tb\r\nc\r\x1b\u200b") == "a    b\nc\\x0d\\x1b\\u200b"
