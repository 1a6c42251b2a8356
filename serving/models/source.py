"""Where a model name points: the embedded default, a shipped part, a Hub id, a folder, or a GGUF file."""

from dataclasses import dataclass, field
from pathlib import Path

from serving.models.embedded import EMBEDDED_MODEL, ensure_embedded_model

ASSETS_DIR = Path(__file__).parent.parent / "assets"


@dataclass(frozen=True)
class ModelSource:
    """`location` is what transformers loads from; a GGUF file is named beside its folder."""

    location: str
    gguf_file: str | None = None
    tokenizer_options: dict[str, str] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        return Path(self.location).is_dir()


def resolve_model(model: str) -> ModelSource:
    """The source of `model`; fetches the embedded model on first use."""
    if model == EMBEDDED_MODEL:
        return ModelSource(str(ensure_embedded_model()))
    if (ASSETS_DIR / model / "config.json").is_file():
        return ModelSource(str(ASSETS_DIR / model))
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return ModelSource(str(path.parent), path.name, {"gguf_file": path.name})
    return ModelSource(str(path) if path.is_dir() else model)
