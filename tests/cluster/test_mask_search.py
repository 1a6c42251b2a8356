"""`search via` from end to end on a tiny model: Ray Tune trials, resumed from the log, masks that profiles can name."""

import json
from pathlib import Path

import numpy as np
import pytest

from jobs.__main__ import main
from serving.config_mask import read_mask
from serving.types import as_ids
from tests.cluster.conftest import jobs
from tuning.selfgen import Dialogue, write_dialogues

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]

NUM_LAYERS = 6


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a Llama of six layers and the embedded model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from serving.models.embedded import ensure_embedded_model

    folder = tmp_path_factory.mktemp("deep")
    tokenizer = AutoTokenizer.from_pretrained(ensure_embedded_model())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.3, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "dialogues.parquet"
    texts = [rng.integers(100, 900, 30) for _ in range(24)]
    write_dialogues(path, [Dialogue(as_ids(ids[:10]), as_ids(ids[10:])) for ids in texts])
    return path


def test_case_38_search_resume_and_use(deep_model: str, data: Path, tmp_path: Path, ray_address: str) -> None:
    out = tmp_path / "out"
    flags = ["search", "via", "--target", deep_model, "--dtype", "float32", "--data", str(data), "--out", str(out)]
    flags += ["--sizes", "2", "--rows", "32", "--held-out-rows", "40", "--final-rows", "40", "--budget", "8"]
    done = jobs(*flags, "--address", ray_address)
    assert done.returncode == 0, done.stderr
    log = (out / "evaluations.jsonl").read_text()
    report = json.loads((out / "report.json").read_text())
    assert [row["arm"] for row in report["arms"]] == ["even", "one at a time", "guided", "random", "alternating"]
    asked = [json.loads(line) for line in log.splitlines()[1:]]
    assert len({(*one["skipped"], -one["block"]) for one in asked}) == len(asked)
    best = min((row for row in report["arms"]), key=lambda row: row["final cost"])
    mask = read_mask(str(out / "mask-2.json"))
    mask.check(deep_model, NUM_LAYERS)
    assert list(mask.skipped) == best["skipped"]
    assert (out / "history.png").stat().st_size > 1000
    (costs,) = report["costs"]
    assert all(costs[f"slim/full, {rows} rows"] > 0.0 for rows in (1, 5, 20))
    assert "the middle tier" in costs["verdict"]
    assert report["masks evaluated"] == len(asked)
    assert report["masks per second"] == pytest.approx(len(asked) / report["seconds"], rel=0.1)
    finals = (out / "finals.jsonl").read_text()
    assert 1 < len(finals.splitlines()) - 1 <= (24 + 6) * len(report["arms"])
    others = [row["less"] for row in report["guided less others, held out"]]
    assert others == ["even", "one at a time", "random", "alternating"]
    assert main([*flags, "--address", "127.0.0.1:9"]) == 0  # everything is in the log: nothing is asked, not even Ray
    assert (out / "evaluations.jsonl").read_text() == log
    assert (out / "finals.jsonl").read_text() == finals
    again = json.loads((out / "report.json").read_text())
    assert (again["seconds"], again["masks evaluated"]) == (report["seconds"], report["masks evaluated"])
