"""A model's digest: by content, not by name."""

import json
import os
import shutil
from pathlib import Path

import pytest

from serving.errors import ModelError
from serving.models.digest import model_digest
from serving.models.source import ASSETS_DIR


def folder(path: Path, *, weights: bytes = b"w", base: str | None = None) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    if base is not None:
        (path / "draft.json").write_text(json.dumps({"base": base, "command": str(path)}))
    return str(path)


def test_the_same_files_are_the_same_model_wherever_they_lie(tmp_path: Path) -> None:
    assert model_digest(folder(tmp_path / "a")) == model_digest(folder(tmp_path / "b"))
    shipped = "smollm2-135m-drafter"
    copy = shutil.copytree(ASSETS_DIR / shipped, tmp_path / "copy")
    assert model_digest(shipped) == model_digest(str(ASSETS_DIR / shipped)) == model_digest(str(copy))


def test_the_embedded_model_is_known_by_name_and_path_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTHOUSE_CACHE", str(tmp_path))
    path = tmp_path / "models" / "smollm2-135m-instruct"
    assert model_digest("smollm2-135m-instruct") == model_digest(str(path))


def test_retrained_in_its_folder_it_is_another_model(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    before = model_digest(path)
    (tmp_path / "a" / "model.safetensors").write_bytes(b"v")
    os.utime(tmp_path / "a" / "model.safetensors", ns=(1, 1))
    assert model_digest(path) != before


def test_a_draft_lm_is_another_one_over_another_base_and_its_card_says_nothing_else(tmp_path: Path) -> None:
    bases = [folder(tmp_path / name, weights=name.encode()) for name in ("one", "two")]
    same = [model_digest(folder(tmp_path / name, base=bases[0])) for name in "ab"]
    assert same[0] == same[1] != model_digest(folder(tmp_path / "c", base=bases[1]))


def test_a_gguf_file_is_itself_and_not_its_neighbours(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf")]
    for path, content in zip(paths, ("1", "2", "1"), strict=True):
        path.write_text(content)
    a, b, _ = (model_digest(str(path)) for path in paths)
    assert a != b


def test_a_hub_id_is_the_commit_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.cached_file", lambda *_: str(tmp_path / "c0ffee" / "config.json"))
    assert model_digest("owner/name") == "c0ffee"

    def missing(*_: str) -> str:
        raise OSError("owner/name is not a model\nsecond line")

    monkeypatch.setattr("transformers.utils.cached_file", missing)
    with pytest.raises(ModelError, match=r"'owner/name' could not be found: owner/name is not a model$"):
        model_digest("owner/name")
