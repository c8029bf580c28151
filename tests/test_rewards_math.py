"""The math reward: the last box, exact and strict, at bounded cost, evaluating nothing as code."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.errors import RewardError
from gspo.rewards import Grader, RewardSpec, example, gold_problem
from gspo.rewards.extract import boxed, extract_answer, last_number
from gspo.rewards.fallback import may_be_handed_over
from gspo.rewards.math import grade_answer, math_reward, parse_gold
from gspo.types import Grading

RIGHT, WRONG, ABSENT, UNRESOLVED = "right", "wrong", "absent", "unresolved"


def verdict(gold: str, text: str, **options: object) -> str:
    parts = math_reward(example(text, answer=gold), **options)  # type: ignore[arg-type]
    if parts["parsed"] == 0.0:
        return ABSENT
    if parts["unresolved"] == 1.0:
        assert parts["reward"] == 0.0
        return UNRESOLVED
    return RIGHT if parts["reward"] == 1.0 else WRONG


def in_box(gold: str, answer: str, **options: object) -> str:
    return verdict(gold, rf"So the answer is $\boxed{{{answer}}}$.", **options)


SAME = [
    # numbers
    ("1/2", "0.5"),
    ("1/2", r"\frac12"),
    ("1/2", r"\frac{1}{2}"),
    ("13", r"\text{13}"),
    ("4", "004"),
    ("204", "204.0"),
    ("204", "408/2"),
    ("204", "m+n=204"),
    ("1204", "1{,}204"),
    ("1204", "1,204"),
    ("1204", r"1,\!204"),
    ("-1.5", r"-\frac{3}{2}"),
    ("-3", "−3"),
    ("0.5", ".5"),
    ("11/2", r"5\frac{1}{2}"),
    ("1/3", r"0.\overline{3}"),
    (r"3 \times 10^5", "300000"),
    ("8", "2^3"),
    ("6", "3!"),
    ("10", r"\binom{5}{2}"),
    ("3", r"\lfloor 7/2 \rfloor"),
    ("3", r"\log_2 8"),
    ("0", r"\sin(\pi)"),
    ("0", r"\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}"),
    ("0", "(x+1)^2-x^2-2x-1"),
    ("-1", r"e^{i\pi}"),
    # decimals of six digits, correctly rounded
    ("1/12", "0.0833333333333333"),
    ("1/3", "0.333333"),
    (r"\pi", "3.141593"),
    # percentages and units
    (r"10\%", r"10\%"),
    (r"10\%", "0.1"),
    ("204", r"204\text{ cm}"),
    ("72 km", "72"),
    (r"5\text{ m}", "5"),
    (r"45^\circ", "45"),
    (r"\$5.50", "5.5"),
    # roots and variables
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}"),
    (r"1+\sqrt{3}i", r"1+i\sqrt{3}"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"2\pi r", r"2r\pi"),
    (r"\sin^2 x", r"1-\cos^2(x)"),
    (r"\frac{x}{2}", "0.5x"),
    ("|x|", r"\sqrt{x^2}"),
    # lists, sets, tuples, intervals, matrices
    ("1331 and 1728", "1728, 1331"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\{1,2\}", "1,2"),
    ("100,200", "200, 100"),
    ("(1,2)", r"\left( 1, 2 \right)"),
    ("(x,y)=(1,2)", "(1,2)"),
    ("[0,1)", "[0,1)"),
    (r"x \in [1,2]", "[1,2]"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty) \cup (-\infty,2)"),
    (r"\pm 2021", "-2021, 2021"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("12:00", "12:00"),
    (r"5:30 \text{ p.m.}", "5:30"),
    (r"12\text{ cm}^2", r"12\ \mathrm{cm}^{2}"),
    (r"3\text{m}/\text{s}", "3"),
    (r"3\mathbf{i}-\mathbf{j}", r"-\mathbf{j}+3\mathbf{i}"),
    (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    (r"\frac{n!}{k!(n-k)!}", r"\binom{n}{k}"),
    ("1011_2", "1011_{2}"),
    # relations
    ("x=5", "5"),
    ("5", "x=5"),
    (r"\sin(e^x+1)", r"\sin(1+e^{x})"),
    ("7", "3+4=7"),
    ("7", "x=3+4=7"),
    ("2x+1", "y=2x+1"),
    ("2x+4y-3=0", "y=-x/2+3/4"),
    ("x>3", "3<x"),
    ("1<x<2", "2>x>1"),
    ("-2x>6", "x<-3"),
    ("x=1,x=2", r"x=2 \text{ or } x=1"),
    # words
    (r"\text{east}", "East"),
    ("Evelyn", r"\text{Evelyn}"),
    (r"\text{no solution}", "no solution"),
    ("A", r"\text{(A)}"),
    # what only math-verify reads
    (r"\mathbb{R}", r"\mathbb{R}"),
    (r"\mathbb{R} \setminus \{0\}", r"\mathbb{R}\setminus\{0\}"),
]

DIFFERENT = [
    ("1/2004!", "1/2006!"),
    ("0", "1/2004!"),
    ("0", "e^{-1000}"),
    ("e^{-1000}", "0"),
    ("e^{-1000}", "e^{-1001}"),
    ("0", r"\sqrt2 - 1.41421356237309504880"),
    ("1/2^{99}", "1/2^{98}"),
    ("1331 and 1728", "1728"),
    ("$1331,1728$", "1728"),
    ("3*x-1*y+13=0", "3x + 4y + 14=0"),
    ("4", r"4\sqrt{2}"),
    ("4", r"4\sqrt(2)"),
    ("(0,1)", "(0,1.5)"),
    ("(0,1)", "[0,1]"),
    ("[0,1)", "[0,1]"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", r"\{1,2\}"),
    ("1/3", "0.333"),
    ("1/3", "0.333334"),
    ("33.3", "100/3"),
    (r"\pi", "3.14"),
    ("204.000001", "204"),
    (r"10\%", "10"),
    ("204", r"204\%"),
    ("204", "1,204"),
    (r"\pm 2021", "2021"),
    ("2021", r"\pm 2021"),
    ("12:00", "1:00"),
    (r"5:30 \text{ p.m.}", r"5:30 \text{ a.m.}"),
    (r"12\text{ cm}^2", r"12\text{ cm}^3"),
    (r"5\text{ m}", r"5\text{ cm}"),
    (r"\text{east}", r"\text{west}"),
    (r"\text{(A)}", "B"),
    ("x=5", "y=5"),
    ("0", "x^2-1=0"),
    ("7", "3+5=7"),
    ("7", "5=6=7"),
    ("(x+1)^2", "x^2+2x+2"),
    ("x^2+y^2", "(x+y)^2"),
    (r"\sqrt{x^2}", "x"),
    ("x>3", "x<3"),
    (r"x\ge 1", "x>1"),
    (r"(-\infty,2)\cup(3,\infty)", r"(-\infty,2]\cup(3,\infty)"),
    (r"\infty", r"-\infty"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("1011_2", "1011_3"),
    (r"\mathbb{R}", r"\mathbb{Z}"),
    ("1", "2"),
]

COSTLY = [
    "10^{5^{5^{5^5}}}",
    "(10^8)!",
    "9^{9^{9^9}}",
    r"\pi^{\pi^{\pi^{\pi}}}",
    r"(((2\pi)^{9999})^{9999})^{9999}",
    r"((10^{9999})^{9999})^{9999}",
    r"\sin(\pi^{\pi^{25}})",
    r"\lfloor \pi^{\pi^{30}} \rfloor",
    "(" * 500 + "5" + ")" * 500,
    r"\sqrt" * 300 + "5",
    "9" * 5000,
    "x+" * 900 + "1",
    r"\binom{10^9}{5\cdot 10^8}",
    r"\binom{n}{10^9}",
    r"(\pi^{20})!",
    "5" + " " * 200_000 + "!",
    "5 aaaa" * 50_000,
    r"e^{10^{1000}}",
    r"\exp(10^{1000})",
]

HOSTILE = [
    "__import__('os').system('touch {file}')",
    r"\pi.__class__",
    r"\begin{pmatrix}__import__('os').system('touch {file}')\end{pmatrix}",
    "f(__import__('os').system('touch {file}'), 1)",
    r"\text{__import__('os').system('touch {file}')}",
    r"\operatorname{zeros}(99999,99999)",
    "open('{file}', 'w')",
    "x.evalf.__globals__",
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_right(gold, answer):
    assert in_box(gold, answer) == RIGHT


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_wrong(gold, answer):
    assert in_box(gold, answer) == WRONG


@pytest.mark.parametrize(
    ("gold", "text", "expected"),
    [
        ("840", r"\boxed{840}., and again \boxed{840}", RIGHT),
        ("4", r"\boxed{004} \boxed{004}", RIGHT),
        ("4", r"\boxed{4}, \boxed{4}", RIGHT),
        ("7", r"first $\boxed{5}$ in the working, hence $\boxed{7}$", RIGHT),
        ("7", r"$\boxed{7}$, no: $\boxed{5}$", WRONG),
        ("7", r"\boxed{1},\boxed{2},\boxed{7}", WRONG),
        ("1,2,7", r"$\boxed{1}$, $\boxed{2}$ and $\boxed{7}$", RIGHT),
        ("204", r"\boxed{100} wait no \boxed{204}", RIGHT),
        ("100204", r"\boxed{100} wait no \boxed{204}", WRONG),
        ("3", r"\boxed{3} or maybe \boxed{2", RIGHT),
        ("2", r"\boxed{2", ABSENT),
        ("2", r"\boxed{}", ABSENT),
        ("2", r"\boxed{ }", ABSENT),
        ("2", "", ABSENT),
        ("2", "the answer is 2", ABSENT),
        (r"1/\sqrt{2}", r"\boxed{\frac{1}{\sqrt{2}}}", RIGHT),
        ("3", r"\boxed{\boxed{3}}", RIGHT),
        ("3", r"\boxed{" * 2000 + "3" + "}" * 2000, RIGHT),
        ("3", r"\boxed{" * 2000, ABSENT),
        ("7", r"<think>\boxed{204}</think> It is \boxed{7}.", RIGHT),
        ("204", r"<think>\boxed{204}</think> The answer is 7", ABSENT),
        ("204", r"<think>so \boxed{204}", ABSENT),
        ("204", r"\boxed{204} </think> \boxed{205}", WRONG),
        (r"\{1\}", r"\boxed{\{1\}}", RIGHT),
    ],
)
def test_which_box_counts(gold, text, expected):
    assert verdict(gold, text) == expected


@pytest.mark.parametrize("answer", COSTLY)
def test_costly_answers_are_given_up_before_they_are_computed(answer):
    assert in_box("5", answer) == UNRESOLVED


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_costly_answers_take_no_time_or_memory():
    script = (
        "import resource, sys, time\n"
        "from gspo.rewards.math import *\n"
        "from gspo.rewards.math import grade_answer, parse_gold, warm_up\n"
        "warm_up(); resource.setrlimit(resource.RLIMIT_CPU, (10, 10))\n"
        "gold = parse_gold('5')\n"
        "for answer in sys.stdin.read().split('\\n'): grade_answer(gold, answer)\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(int(peak.split()[1]) // 1024)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], input="\n".join(COSTLY), capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 200  # MB, interpreter and sympy included


@pytest.mark.parametrize("answer", HOSTILE)
@pytest.mark.parametrize("gold", ["1", r"\mathbb{R}", "x+1", r"\text{yes}", "(1,2)"])
def test_nothing_is_evaluated_as_code(gold, answer, tmp_path):
    planted = tmp_path / "planted"
    assert in_box(gold, answer.replace("{file}", str(planted))) in (WRONG, UNRESOLVED)
    assert not planted.exists()
    assert in_box("1", "2") == WRONG and in_box("1", "1") == RIGHT


@pytest.mark.parametrize(
    "text",
    ["10^{5^{5}}", "x!", "__import__('os')", r"\operatorname{zeros}(9,9)", r"\int_0^1 x", "a" * 300, "12345678901234"],
)
def test_what_math_verify_does_not_get_to_see(text):
    assert not may_be_handed_over(text)


@pytest.mark.parametrize(
    ("gold", "reason"),
    [
        (None, "empty"),
        ("", "empty"),
        ("  ", "empty"),
        ("see figure", "sentence"),
        ("the answer is 5", "sentence"),
        (r"\text{}", "empty"),
        ("5 +", "unexpected end"),
        (r"\begin{tikz}", "begin"),
        ("10^{5^{5^{5^5}}}", "exponent"),
    ],
)
def test_a_bad_reference_answer_has_a_reason_and_grades_nothing(gold, reason):
    assert reason in (gold_problem(gold) or "")
    with pytest.raises(RewardError, match="cannot be graded"):
        math_reward(example(r"\boxed{5}", answer=gold))


@pytest.mark.parametrize("gold", ["5", "She sold 24. 48+24 = 72\n#### 1,072", r"so it is $\boxed{1/2}$", "x=1 or x=2"])
def test_a_good_reference_answer_has_no_problem(gold):
    assert gold_problem(gold) is None


def test_the_reference_answer_of_a_worked_solution_is_its_end():
    assert in_box("48/2 = 24\n#### 72", "72") == RIGHT
    assert in_box("48/2 = 24\n#### 72", "24") == WRONG


@pytest.mark.parametrize(
    ("answer_format", "text", "expected"),
    [
        ("####", "6*7 = 42\n#### 42", RIGHT),
        ("####", "#### 41 no\n#### 42\nbye", RIGHT),
        ("####", "6*7 = 42", ABSENT),
        ("answer_tag", "<answer>41</answer> <answer>42</answer>", RIGHT),
        ("answer_tag", r"<answer>It is \boxed{42}.</answer>", RIGHT),
        ("answer_tag", r"\boxed{42}", ABSENT),
        ("last_number", "6 times 7 makes 42.", RIGHT),
        ("last_number", "it is 42, not 41", WRONG),
        ("last_number", "none", ABSENT),
        ("any", "Final Answer: **42**", RIGHT),
        ("any", "The answer is $42$.", RIGHT),
        ("any", r"The answer is 41. \boxed{42}", RIGHT),
        ("text", " 42 ", RIGHT),
    ],
)
def test_declared_answer_formats(answer_format, text, expected):
    assert verdict("42", text, answer_format=answer_format) == expected


def test_a_comparison_that_outlives_its_budget_is_given_up(monkeypatch):
    def endless(gold: str, answer: str) -> bool:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    gold = parse_gold(r"\mathbb{R}")
    monkeypatch.setattr("gspo.rewards.compare.same_by_math_verify", endless)
    monkeypatch.setattr("gspo.rewards.math.BUDGET_S", 0.05)
    assert grade_answer(gold, r"\mathbb{Z}") is None
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_options():
    assert verdict("3", r"\fbox{3}") == ABSENT
    assert verdict("3", r"\fbox{3}", accept_fbox=True) == RIGHT
    assert in_box(r"10\%", "10", percent="ignore") == RIGHT
    assert in_box("204", r"204\%", percent="ignore") == RIGHT
    with pytest.raises(RewardError, match="answer_format"):
        extract_answer("5", "latex")  # type: ignore[arg-type]


def test_numbers_found_in_text():
    found = {"-5": "-5", "x2 is 1,234.5!": "1,234.5", "so 3/4": "3/4", "a-b": None, "5%": "5%", "1,2": "2"}
    assert {text: last_number(text) for text in found} == found


def test_from_a_thread_and_in_workers():
    box: list[bool | None] = []
    thread = threading.Thread(target=lambda: box.append(grade_answer(parse_gold("3"), "3")))
    thread.start()
    thread.join()
    assert box == [True]
    texts = [r"\boxed{3}", r"\boxed{4}", "3", r"\boxed{9^{9^{9^9}}}"]
    rollouts = [example(t, answer="3") for t in texts] + [example(r"\boxed{3}", answer="see figure")]
    with Grader([RewardSpec("math")], workers=2) as grader:
        verdicts = grader.grade(rollouts)
    assert [v.reward for v in verdicts] == [1.0, 0.0, 0.0, 0.0, None]
    assert [v.parts.get("math/parsed") for v in verdicts] == [1.0, 1.0, 0.0, 1.0, None]
    assert [v.parts.get("math/unresolved") for v in verdicts] == [0.0, 0.0, 0.0, 1.0, None]
    assert verdicts[4].grading is Grading.FAILED and "see figure" in verdicts[4].error


def test_math_verify_keeps_quiet(caplog):
    with caplog.at_level(logging.DEBUG):
        in_box(r"\mathbb{R}", r"\mathbb{Z}")
    assert not [record for record in caplog.records if "imeout" in record.message]


NUMBERS = st.fractions(max_denominator=1000).filter(lambda f: abs(f) < 10**6)
PIECES = st.sampled_from(
    [
        *"xyn0123456789^_{}()[]|+-*/=<>,;!%:.ei&",
        *(r"\frac", r"\sqrt", r"\pi", r"\{", r"\}", r"\le", r"\cup", r"\pm", r"\text{cm}", r"\text{and}", " ", r"\sin"),
        *(r"\log", r"\infty", r"\binom", r"\lfloor", r"\rfloor", r"\\", r"\mathbb{R}", r"\begin{pmatrix}"),
        *(r"\end{pmatrix}", r"\boxed{", r"\in", "99", "^{-1}"),
    ]
)


@given(NUMBERS, NUMBERS)
def test_two_rationals_are_right_exactly_when_they_are_equal(a, b):
    forms = [str(a), rf"\frac{{{a.numerator}}}{{{a.denominator}}}", f"({a})", f"{2 * a.numerator}/{2 * a.denominator}"]
    for form in forms:
        assert in_box(str(a), form) == RIGHT
        assert in_box(str(b), form) == (RIGHT if a == b else WRONG)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(PIECES, max_size=14).map("".join), st.sampled_from(["5", "x+1", "(1,2)", "x>3", r"\mathbb{R}", r"\sqrt2"])
)
def test_any_text_gets_a_verdict_and_reads_the_same_twice(text, gold):
    assert grade_answer(parse_gold(gold), text) in (True, False, None)
    own = parse_gold(text)
    if own.ok and r"\boxed" not in text:
        assert grade_answer(own, text) is True
    assert boxed(text) == boxed(text + " no more")
