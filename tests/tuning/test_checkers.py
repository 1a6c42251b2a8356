"""Task checkers: numbers at the end of an answer, and code that runs behind a fence."""

import pytest

from tuning.checkers import checker_of, final_number, last_number, solves_code, solves_number
from tuning.prompts import Prompt

CODE = Prompt(
    id="c",
    turns=('def double(x):\n    """Twice x."""\n',),
    test="def check(candidate):\n    assert candidate(3) == 6\n",
    entry_point="double",
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 1,000.", 1000.0),
        ("3 and then -4.5", -4.5),
        ("none", None),
        ("#### 18", 18.0),
        ("$1,234,567.5", 1234567.5),
    ],
)
def test_the_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("reference", "number"), [("18", 18.0), ("a\n#### 1,000", 1000.0), ("words 5", None), ("", None), ("5pi", None)]
)
def test_a_reference_is_a_number_or_ends_in_one(reference: str, number: float | None) -> None:
    assert final_number(reference) == number


def test_a_number_is_checked() -> None:
    prompt = Prompt(id="n", turns=("?",), reference=["a #### 1,000"])
    assert checker_of(prompt, runs_code=False) is solves_number
    assert solves_number(prompt, "The total is $1000.")
    assert not solves_number(prompt, "1000 is wrong, it is 7")
    assert checker_of(Prompt(id="w", turns=("?",), reference="words"), runs_code=False) is None


def test_code_is_run_only_where_that_is_asked_for() -> None:
    assert checker_of(CODE, runs_code=False) is None
    assert checker_of(CODE, runs_code=True) is solves_code


@pytest.mark.parametrize(
    ("answer", "is_solved"),
    [
        ("    return 2 * x\n", True),
        ("Here:\n```python\ndef double(x):\n    return x + x\n```\nDone.", True),
        ("    return x\n", False),
        ("    return (\n", False),
        ("    raise SystemExit(0)\n", False),
        ("    while True: pass\n", False),
        ("    return len(bytearray(2**31)) * 0 + 6\n", False),
    ],
    ids=["body", "block", "wrong", "no Python", "leaves early", "never ends", "too much memory"],
)
def test_code(answer: str, is_solved: bool) -> None:
    assert solves_code(CODE, answer) is is_solved
