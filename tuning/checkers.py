"""Whether an answer solves its task: GSM8K's final number, HumanEval's tests. Running code is off unless asked for."""

import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from tuning.prompts import Prompt

Checker: TypeAlias = Callable[[Prompt, str], bool]

TIME_LIMIT_S = 5
MEMORY_LIMIT_BYTES = 512 * 1024 * 1024
FILE_LIMIT_BYTES = 16 * 1024 * 1024
# Set by the child itself, before any line of the answer: a fork with a function in between is not safe beside threads.
_LIMITS = f"""import resource
resource.setrlimit(resource.RLIMIT_CPU, ({TIME_LIMIT_S}, {TIME_LIMIT_S}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_LIMIT_BYTES}, {MEMORY_LIMIT_BYTES}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_LIMIT_BYTES}, {FILE_LIMIT_BYTES}))
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # no further process or thread, but for root
"""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_CODE = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)


def checker_of(prompt: Prompt, *, runs_code: bool) -> Checker | None:
    """How the task of `prompt` is checked; None where it has no checker, or it would run code and may not."""
    if prompt.test is not None and prompt.entry_point is not None:
        return solves_code if runs_code else None
    return solves_number if final_number(_reference(prompt)) is not None else None


def solves_number(prompt: Prompt, answer: str) -> bool:
    """The last number of the answer equals the reference's final number."""
    expected, found = final_number(_reference(prompt)), last_number(answer)
    return expected is not None and found is not None and abs(expected - found) < 1e-6


def final_number(reference: str) -> float | None:
    """What stands behind GSM8K's `####`, or a reference that is a number and nothing else."""
    tail = reference.rsplit("####", 1)[-1].strip() if "####" in reference else reference.strip()
    return float(tail.replace(",", "")) if _NUMBER.fullmatch(tail) else None


def last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def solves_code(prompt: Prompt, answer: str) -> bool:
    """The function passes the task's tests, in a process of its own with little time, memory and disk.

    That is a fence, not a prison: the code may read files and reach the network. Run it where that does no harm.
    """
    passed = uuid.uuid4().hex  # an answer that ends the process early has not passed
    with tempfile.TemporaryDirectory() as folder:
        verdict = Path(folder, passed)
        tell = f"open({str(verdict)!r}, 'x').close()"
        parts = (_LIMITS, _program(prompt, answer), prompt.test or "", f"check({prompt.entry_point})", tell)
        return _run("\n\n".join(parts), folder) == 0 and verdict.is_file()


def _run(program: str, folder: str) -> int | None:
    """Exit status of `program`, None where it takes too long. What it prints is lost, what it has started ends."""
    with subprocess.Popen(
        [sys.executable, "-I", "-c", program],
        cwd=folder,
        env={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as child:
        try:
            return child.wait(timeout=2 * TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(child.pid, signal.SIGKILL)


def _program(prompt: Prompt, answer: str) -> str:
    """The answer's code: a whole function in a code block, or the body that goes on where the prompt stops.

    A whole function follows what stands before it in the prompt: imports and helpers that it may leave out.
    """
    blocks = _CODE.findall(answer)
    code = max(blocks, key=len) if blocks else answer
    begins = re.compile(rf"^def {re.escape(prompt.entry_point or '')}\b", re.MULTILINE)
    if not begins.search(code):
        return prompt.text + code
    preamble = begins.split(prompt.text)[0]
    return f"{preamble}\n{code}" if _is_code(preamble) else code


def _is_code(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:  # words that ask for a function
        return False
    return True


def _reference(prompt: Prompt) -> str:
    reference = prompt.reference
    if isinstance(reference, list):
        reference = reference[0] if len(reference) == 1 else None
    return reference if isinstance(reference, str) else ""
