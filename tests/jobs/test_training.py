"""Jobs that train drafters, on a toy target: refusals before any work, and what of a work folder is used again."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from jobs.__main__ import main
from jobs.training import max_length_of
from serving.types import as_ids
from tests.models.tiny import VOCAB, tiny_model
from tuning.selfgen import Dialogue, write_dialogues

pytestmark = pytest.mark.usefixtures("one_thread")

VERBS = ("train-drafter", "train-eagle3")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A target with a config and nothing else: whatever loads it fails."""
    tiny_model("llama", num_hidden_layers=8).config.save_pretrained(tmp_path / "bare")
    return tmp_path / "bare"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2").save_pretrained(tmp_path / "target")
    tiny_model("llama", num_hidden_layers=8).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    texts = [[(7 * i + 5 * j) % 180 + 3 for j in range(20)] for i in range(12)]
    path = tmp_path / "data.parquet"
    write_dialogues(path, [Dialogue(as_ids(text[:6]), as_ids(text[6:])) for text in texts])
    return path


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--vocab-size", "0"], "--vocab-size: must be at least 1, got 0"),
        (["--epochs", "0"], "--epochs: must be at least 1"),
        (["--limit", "0"], "--limit: must be at least 1"),
        (["--tokens", "-1"], "--tokens: must be at least 0"),
        (["--seed", "-1"], "--seed: must be at least 0"),
        (["--learning-rate", "nan"], "--learning-rate: must be above 0 and finite"),
        (["--tokens", "100"], "--held-out: 64 may leave nothing to train on"),
        (["--tokens", "0", "--held-out", "0"], "--held-out: 0 may leave nothing to train on"),
        (["--data", "no-such-file"], "--data no-such-file: is no file"),
        (["--out", "/proc/here"], "--out: nothing can be written to /proc/here"),
        (["--work", "/proc/here"], "--work: nothing can be written to /proc/here"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_loaded(
    verb: str, flags: list[str], said: str, bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert main([verb, "--target", str(bare), *where, *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["train-drafter", "--layers", "0,8"], "--layers: '0,8' names a layer outside 0..7"),
        (["train-drafter", "--layers", "x"], "--layers: must be integers"),
        (["train-eagle3", "--steps-ahead", "0"], "--steps-ahead: must be at least 1"),
        (["train-eagle3", "--shards", "0"], "--shards: must be at least 1"),
    ],
)
def test_so_is_what_one_job_alone_is_told(
    flags: list[str], said: str, bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--target", str(bare), "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("phi", {}, "of type 'phi': its decoder has no 'norm' behind the last layer"),
        ("llama", {"num_hidden_layers": 6}, "feature layers must be three ascending layers"),
    ],
)
def test_a_target_that_no_head_can_be_trained_for_is_refused_before_anything_is_generated(
    family: str, changes: dict[str, int], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(family, **{"num_hidden_layers": 8, **changes}).config.save_pretrained(tmp_path / family)
    assert main(["train-eagle3", "--target", str(tmp_path / family), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("verb", VERBS)
def test_text_that_is_longer_than_the_target_reads_is_refused(
    verb: str, bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, long = tmp_path / "long.parquet", as_ids([5] * 400)
    write_dialogues(path, [Dialogue(long, long)] * 2)
    flags = ["--tokens", "0", "--held-out", "1", "--data", str(path), "--work", str(tmp_path / "work")]
    assert main([verb, "--target", str(bare), "--out", str(tmp_path / "out"), *flags]) == 2
    assert "a dialogue of 800 tokens exceeds the 512 positions" in capsys.readouterr().err


def test_a_target_of_few_positions_is_used_to_its_last(bare: Path, tmp_path: Path) -> None:
    assert max_length_of(str(bare)) == 512
    tiny_model("llama", max_position_embeddings=8192).config.save_pretrained(tmp_path / "long")
    assert max_length_of(str(tmp_path / "long")) == 1024


def test_a_head_is_trained_on_from_another(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(out: str, *flags: str) -> int:
        where = ["--target", str(target), "--data", str(data), "--work", str(tmp_path / f"work-{out}")]
        sizes = ["--tokens", "0", "--held-out", "2", "--epochs", "1", "--vocab-size", "90"]
        return main(["train-eagle3", *where, *sizes, "--out", str(tmp_path / out), *flags])

    first = str(tmp_path / "first")
    assert train("first", "--dtype", "bfloat16") == 0
    assert train("still", "--from", first, "--learning-rate", "1e-12") == 0
    before, after = (load_file(tmp_path / out / "model.safetensors") for out in ("first", "still"))
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor)
    capsys.readouterr()
    refused: dict[str, list[str]] = {
        "is of a training with other from": ["still", "--learning-rate", "1e-12"],
        "--vocab-size: must be the 90 of --from, got 80": ["other", "--from", first, "--vocab-size", "80"],
        "must hold the eagle3.json": ["other", "--from", str(target)],
        "is a head for": ["other", "--from", first, "--target", "smollm2-135m-instruct"],
        "--out: must not be the head of --from": ["first", "--from", first],
    }
    for said, call in refused.items():
        assert train(*call) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_a_finished_training_is_exported_again_but_never_as_another(
    verb: str, target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(out: str, *flags: str) -> int:
        where = ["--target", str(target), "--data", str(data), "--work", str(tmp_path / "work")]
        sizes = ["--tokens", "0", "--held-out", "2", "--epochs", "1", "--vocab-size", "90"]
        return main([verb, *where, *sizes, "--out", str(tmp_path / out), *flags])

    assert train("first") == 0
    assert train("again") == 0
    first, again = (tmp_path / out / "model.safetensors" for out in ("first", "again"))
    assert first.read_bytes() == again.read_bytes()
    capsys.readouterr()
    others = {"--seed": "1", "--vocab-size": "80", "--learning-rate": "0.1", "--limit": "5"}
    for flag, value in others.items():
        assert train("other", flag, value) == 2
        error = capsys.readouterr().err
        assert "is of a training with other" in error
        assert len(error.splitlines()) == 1
    assert not (tmp_path / "other" / "model.safetensors").exists()
