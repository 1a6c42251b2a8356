"""`python -m jobs VERB ...`: one verb a module, `train-drafter` is jobs/train_drafter.py.

A verb's module has `SUMMARY`, one line, and `main(argv) -> int`, the exit status.
"""

import ast
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from serving.errors import ConfigError, DrafthouseError

FOLDER = Path(__file__).parent


def main(argv: Sequence[str]) -> int:
    """Run one verb. An error that a user is meant to read is one message on stderr, never a traceback."""
    verbs = verb_modules()
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(verbs))
        return 0 if argv else 2
    verb, *rest = argv
    if verb not in verbs:
        print(f"jobs: unknown verb {verb!r}; one of: {', '.join(verbs)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _leave)  # so that what was started here is taken down
    try:
        status: int = importlib.import_module(f"jobs.{verbs[verb].stem}").main(rest)
        return status
    except DrafthouseError as error:
        print(f"{verb}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:  # a file or folder of the user's that is not to be had
        print(f"{verb}: {error.filename or 'input/output'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def verb_modules(folder: Path = FOLDER) -> dict[str, Path]:
    """Verb to file; found by looking, so that a verb is one file and nothing else."""
    files = sorted(path for path in folder.glob("*.py") if not path.stem.startswith("_"))
    return {path.stem.replace("_", "-"): path for path in files if summary(path)}


def summary(path: Path) -> str:
    """The SUMMARY of a verb's module, read without importing it; empty where the file is no verb."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="SUMMARY")], value=ast.Constant(value=str(text))):
                return text
    return ""


def usage(verbs: dict[str, Path]) -> str:
    lines = [f"  {verb:16}{summary(path)}" for verb, path in verbs.items()]
    return "\n".join(["usage: python -m jobs VERB [--help] ...", "", *lines])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
