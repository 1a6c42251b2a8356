"""Where names point, and sentences for those that point nowhere."""

import os
from pathlib import Path

import pytest

from serving.errors import ModelError
from serving.models.source import resolve_model, shipped_parts


def test_hub_ids_pass_through_and_folders_are_folders(tmp_path: Path) -> None:
    assert resolve_model("owner/name").location == "owner/name"
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)).location == str(tmp_path)
    (tmp_path / "m.gguf").write_text("")
    assert resolve_model(str(tmp_path / "m.gguf")).gguf_file == "m.gguf"


def test_the_drafters_that_ship_are_found_by_name() -> None:
    assert shipped_parts() == ["smollm2-135m-drafter", "smollm2-135m-eagle3"]
    assert all(Path(resolve_model(name).location).is_dir() for name in shipped_parts())


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "./here", "no.gguf", "a/b/c"])
def test_what_can_be_no_model_is_refused_at_once(name: str) -> None:
    with pytest.raises(ModelError, match="neither shipped"):
        resolve_model(name)


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_a_key_tells_a_model_from_one_elsewhere_and_from_its_weights_before(tmp_path: Path) -> None:
    folders = [tmp_path / name / "model" for name in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text("weights")
    first, second = (resolve_model(str(folder)).key for folder in folders)
    assert first != second
    assert resolve_model(str(folders[0] / ".." / "model")).key == first
    os.utime(folders[0] / "model.safetensors", ns=(0, 0))
    assert resolve_model(str(folders[0])).key != first
    assert resolve_model("owner/name").key != resolve_model("owner/other").key
