"""C++ compiled for this very processor on first use, into the user's cache. Standard library only."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-pthread",
    "-shared",
    "-fPIC",
    "-std=c++20",
)


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """`$DRAFTHOUSE_CACHE`, else `~/.cache/drafthouse`."""
    return Path(environ.get("DRAFTHOUSE_CACHE") or "~/.cache/drafthouse").expanduser().absolute()


@cache
def load_library(source: Path, *, otherwise: str) -> ctypes.CDLL | None:
    """The library made of `source` and what lies beside it, compiled on first use (seconds).

    None where there is no compiler or DRAFTHOUSE_NATIVE=0; `otherwise` completes the warning.
    """
    if os.environ.get("DRAFTHOUSE_NATIVE", "1") == "0":
        return None
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        log.warning("no C++ compiler found (g++): %s", otherwise)
        return None
    try:
        return ctypes.CDLL(str(_build(compiler, source)))
    except (subprocess.CalledProcessError, OSError) as error:
        detail = error.stderr.decode()[-300:] if isinstance(error, subprocess.CalledProcessError) else str(error)
        log.warning("%s could not be built, %s: %s", source.name, otherwise, detail)
        return None


def _build(compiler: str, source: Path) -> Path:
    """Compile into the cache under a name made of sources, flags and processor; atomic among processes."""
    contents = (path.read_bytes() for path in sorted(source.parent.glob("*.[ch]*")))
    key = hashlib.sha256(b"\0".join((*contents, " ".join(_FLAGS).encode(), _processor().encode()))).hexdigest()[:16]
    target = cache_root() / "native" / f"drafthouse-{source.stem}-{key}.so"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *_FLAGS, str(source), "-o", str(partial)], check=True, capture_output=True)
        partial.replace(target)
    return target


def _processor() -> str:
    """What -march=native depends on: the instruction sets of this processor."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        return next((line for line in info.read_text().splitlines() if line.startswith("flags")), "")
    return platform.processor()
