"""Task checkers: numbers at the end of an answer, and code that runs behind a fence."""

import time
import tracemalloc
from pathlib import Path

import pytest

from tuning import checkers
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
    ("text", "is_solved"),
    [
        ("import math\n\n\ndef two():\n    return 2\n\n\ndef double(x):\n", True),
        ("import math\n\n\ndef double(x):\n", False),
        ("Please write in Python\n\ndef double(x):\n", False),
    ],
    ids=["helper and import", "no helper", "words"],
)
def test_a_whole_function_may_use_what_stands_before_it_in_the_prompt(text: str, is_solved: bool) -> None:
    prompt = CODE.model_copy(update={"turns": (text,)})
    assert solves_code(prompt, "```python\ndef double(x):\n    return math.floor(two()) * x\n```") is is_solved
    assert solves_code(prompt, "```python\ndef double(x):\n    return 2 * x\n```")


def test_a_function_of_a_longer_name_is_not_the_one_asked_for() -> None:
    assert not solves_code(CODE, "```python\ndef doubled(x):\n    return 2 * x\n```")


def test_what_an_answer_prints_is_not_kept() -> None:
    tracemalloc.start()
    assert solves_code(CODE, "    for _ in range(64): print('x' * 2**20)\n    return 2 * x\n")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_an_answer_has_started_ends_with_it(
    tmp_path: Path, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkers, "TIME_LIMIT_S", 0.5)
    late = tmp_path / "late"
    started = f"import time; time.sleep(2); open({str(late)!r}, 'w')"
    body = f"    import subprocess, sys, time\n    subprocess.Popen([sys.executable, '-c', {started!r}])\n"
    solves_code(CODE, body + "    time.sleep(60)\n" * goes_on + "    return 2 * x\n")
    time.sleep(2.5)
    assert not late.exists()


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
        ("    open('f', 'wb').write(bytes(64 * 2**20))\n    return 2 * x\n", False),
    ],
    ids=["body", "block", "wrong", "no Python", "leaves early", "never ends", "too much memory", "too large a file"],
)
def test_code(answer: str, is_solved: bool) -> None:
    assert solves_code(CODE, answer) is is_solved
