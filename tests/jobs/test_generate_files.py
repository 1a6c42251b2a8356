"""`generate` and its files on a tiny model: what a second run finds, and what a refused one leaves behind."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from jobs.__main__ import main
from tests.models.tiny import VOCAB, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama whose tokenizer knows the words w0, w1 and so on."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    turns = {"good": "w5 w6 w7", "long": "w8 " * 99, "last": "w9 w10"}
    path.write_text("".join(json.dumps({"id": name, "turns": [text]}) + "\n" for name, text in turns.items()))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "results" / "out.jsonl"


def generate(prompts: Path, out: Path, *flags: str) -> int:
    lengths = ["--raw", "--max-tokens", "4", "--max-length", "64", "--batch", "2"]
    return main(["generate", "--profile", "plain", "--prompts", str(prompts), "--out", str(out), *lengths, *flags])


def test_errors_on_file_count_as_those_of_this_run(
    prompts: Path, out: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert generate(prompts, out, "--target", model) == 1
        assert json.loads(capsys.readouterr().out)["failed"] == 1
    assert ["error" in json.loads(line) for line in out.read_text().splitlines()] == [False, True, False]


def test_a_damaged_line_is_named_by_its_number(
    prompts: Path, out: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(prompts, out, "--target", model)
    first, _, last = out.read_text().splitlines()
    out.write_text(f'{first}\n{{"id": "long", "err\n{last}\n')
    capsys.readouterr()
    assert generate(prompts, out, "--target", model) == 2
    assert "out.jsonl, line 2: is no JSON object with id" in capsys.readouterr().err


def test_missing_settings_are_not_other_settings(
    prompts: Path, out: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(prompts, out, "--target", model)
    out.with_name("out.jsonl.settings").unlink()
    capsys.readouterr()
    assert generate(prompts, out, "--target", model) == 2
    error = capsys.readouterr().err
    assert "out.jsonl.settings, which says how it was made, is missing" in error
    assert "other flags" not in error


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--target", "nosuch"], "--target: 'nosuch' is neither shipped ("),
        (["--profile", "strict", "--drafter", "nosuch"], "--drafter: 'nosuch' is neither shipped ("),
        (["--batch", "0"], "--batch: engine.max_sessions: Input should be greater than or equal to 1 (got 0)"),
        (["--max-length", "0"], "--max-length: engine.max_length: Input should be greater than or equal to 2 (got 0)"),
        (["--profile", "suffix", "--max-draft", "65"], "--max-draft: drafter.suffix.max_draft: "),
    ],
)
def test_a_refused_run_names_the_flag_and_leaves_nothing_behind(
    flags: list[str], said: str, prompts: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(prompts, out, *flags) == 2
    assert capsys.readouterr().err.startswith(f"generate: {said}")
    assert not out.parent.exists()


def test_a_folder_is_no_file_to_write(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(prompts, tmp_path) == 2
    assert capsys.readouterr().err == f"generate: --out: {tmp_path} is a folder; name a file\n"


def test_a_model_that_does_not_load_leaves_nothing_behind(prompts: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert generate(prompts, out, "--target", str(tmp_path)) == 1
    assert not out.parent.exists()
