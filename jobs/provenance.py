"""Where a measurement comes from: command, date, processor, revision, versions."""

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_VECTOR_UNITS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")


@dataclass(frozen=True)
class Provenance:
    """Of a report made now, on this machine, by `command`."""

    command: str
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    processor: str = field(default_factory=lambda: processor())
    revision: str | None = field(default_factory=lambda: revision())
    versions: dict[str, str] = field(default_factory=lambda: versions())

    @classmethod
    def of(cls, verb: str, argv: Sequence[str]) -> "Provenance":
        return cls(f"python -m jobs {verb} {shlex.join(argv)}")


def processor() -> str:
    """Number and name of the CPUs, with the widest vector unit that matters here."""
    lines = _CPU_INFO.read_text(encoding="utf-8").splitlines() if _CPU_INFO.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    best = next((unit for unit in _VECTOR_UNITS if unit in flags), "")
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{len(names) or os.cpu_count()} x {name}" + (f" ({best})" if best else "")


def revision() -> str | None:
    """The commit of this code, where it lies in a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None


def versions() -> dict[str, str]:
    """Of the libraries that speed depends on."""
    return {name: version(name) for name in ("torch", "transformers", "numpy", "ray", "httpx")}
