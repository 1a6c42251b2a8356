"""Whether an answer solves its task: GSM8K's final number, HumanEval's tests. Running code is off unless asked for."""

import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from typing import TypeAlias

from tuning.prompts import Prompt

Checker: TypeAlias = Callable[[Prompt, str], bool]

TIME_LIMIT_S = 5
MEMORY_LIMIT_BYTES = 512 * 1024 * 1024
# Set by the child itself, before any line of the answer: a fork with a function in between is not safe beside threads.
_LIMITS = f"""import resource
resource.setrlimit(resource.RLIMIT_CPU, ({TIME_LIMIT_S}, {TIME_LIMIT_S}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_LIMIT_BYTES}, {MEMORY_LIMIT_BYTES}))
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
    """The function passes the task's tests, in a process of its own with little time and memory.

    That is a fence, not a prison: the code may read files and reach the network. Run it where that does no harm.
    """
    passed = uuid.uuid4().hex  # an answer that ends the process early has not passed
    parts = (_LIMITS, _program(prompt, answer), prompt.test or "", f"check({prompt.entry_point})", f"print('{passed}')")
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", "\n\n".join(parts)],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=2 * TIME_LIMIT_S,
                text=True,
                errors="replace",
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0 and done.stdout.endswith(f"{passed}\n")


def _program(prompt: Prompt, answer: str) -> str:
    """The answer's code: a whole function in a code block, or the body that goes on where the prompt stops."""
    blocks = _CODE.findall(answer)
    code = max(blocks, key=len) if blocks else answer
    return code if f"def {prompt.entry_point}" in code else prompt.text + code


def _reference(prompt: Prompt) -> str:
    reference = prompt.reference
    if isinstance(reference, list):
        reference = reference[0] if len(reference) == 1 else None
    return reference if isinstance(reference, str) else ""
