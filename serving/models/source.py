"""Where a model name points: the embedded default, a shipped part, a Hub id, a folder, or a GGUF file."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from serving.errors import ModelError
from serving.models.embedded import EMBEDDED_MODEL, ensure_embedded_model

ASSETS_DIR = Path(__file__).parent.parent / "assets"
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class ModelSource:
    """`location` is what transformers loads from; a GGUF file is named beside its folder."""

    location: str
    gguf_file: str | None = None
    tokenizer_options: dict[str, str] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        return Path(self.location).is_dir()

    @property
    def key(self) -> str:
        """16 hex digits that tell this model from others: where it is and, in a folder here, what its files' stats are.

        Weights trained anew in the same folder have another key; so has a copy elsewhere.
        """
        parts = [self.location, self.gguf_file]
        if self.is_local:
            folder = Path(self.location).resolve()
            stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
            parts = [str(folder), self.gguf_file, *(f"{name} {s.st_size} {s.st_mtime_ns}" for name, s in stats)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def resolve_model(model: str) -> ModelSource:
    """The source of `model`; fetches the embedded model on first use. Raises ModelError for what can be none."""
    if model == EMBEDDED_MODEL:
        return ModelSource(str(ensure_embedded_model()))
    if (ASSETS_DIR / model / "config.json").is_file():
        return ModelSource(str(ASSETS_DIR / model))
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return ModelSource(str(path.parent), path.name, {"gguf_file": path.name})
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model: the folder {model!r} holds no config.json, so it is no model")
        return ModelSource(str(path))
    if not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"model: {model!r} is neither shipped ({EMBEDDED_MODEL}, {', '.join(shipped_parts())}) nor a folder or "
            "GGUF file here, and a Hub id has the form owner/name"
        )
    return ModelSource(model)


def shipped_parts() -> list[str]:
    """Names of the small trained parts in `serving/assets`."""
    return sorted(path.parent.name for path in ASSETS_DIR.glob("*/config.json"))
