"""Reports on disk."""

import json
import os
import tempfile
from pathlib import Path

from serving.errors import ConfigError


def check_writable(path: Path) -> None:
    """Make the folder; raises ConfigError before the work rather than OSError behind it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--json: the folder of {path} cannot be made: {error.strerror}") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--json: {path} cannot be written")


def check_folder(flag: str, folder: Path) -> None:
    """Make the folder, and for a moment a file in it; raises ConfigError as `check_writable` does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{flag}: nothing can be written to {folder}: {error.strerror}") from None


def write_json(path: Path, report: object) -> None:
    """Write `report`, indented."""
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
