"""What a model is by content: trained anew in its folder it is another, under another path the same. No torch."""

import hashlib
import json
from functools import cache
from pathlib import Path

from serving.compiling import cache_root
from serving.errors import ModelError
from serving.models.embedded import EMBEDDED_MODEL, FORMAT, SMOLLM2
from serving.models.source import ModelSource, resolve_model

_WEIGHTS = ("config.json", "*.safetensors", "*.bin")
_DRAFT_CARD = "draft.json"


def model_digest(model: str) -> str:
    """Hex digits that name the weights and config of `model`; of a Hub id, the commit that is in the local cache.

    Raises ModelError where there is no such model.
    """
    embedded = cache_root() / "models" / EMBEDDED_MODEL
    if model == EMBEDDED_MODEL or Path(model).expanduser().resolve() == embedded.resolve():
        # By its source: what a build writes around the same weights depends on the library's version.
        return f"{SMOLLM2.sha256}-{FORMAT}"
    source = resolve_model(model)
    return _folder_digest(source) if source.is_local else _hub_commit(model)


def _folder_digest(source: ModelSource) -> str:
    folder = Path(source.location)
    patterns = _WEIGHTS if source.gguf_file is None else (source.gguf_file,)
    files = sorted(path for pattern in patterns for path in folder.glob(pattern))
    parts = [f"{path.name} {file_digest(path)}" for path in files]
    card = folder / _DRAFT_CARD
    if source.gguf_file is None and card.is_file():  # a draft LM speaks with its base's embedding and head
        parts.append(f"base {model_digest(json.loads(card.read_text(encoding='utf-8'))['base'])}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, read once for each state of the file."""
    state = path.stat()
    return _read_digest(path, state.st_mtime_ns, state.st_size)


@cache
def _read_digest(path: Path, mtime_ns: int, size: int) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _hub_commit(model: str) -> str:
    """The commit that names the folder of a snapshot in the Hub's cache."""
    from transformers.utils import cached_file

    try:
        config = cached_file(model, "config.json")
    except OSError as error:
        raise ModelError(f"model {model!r} could not be found: {str(error).splitlines()[0]}") from None
    return Path(str(config)).parent.name
