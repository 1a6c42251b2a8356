"""From a folder to a working model: plans that do not fit, limits, GGUF-free folders, both decoders."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from serving.errors import ConfigError, MemoryPlanError, ModelError
from serving.models.loading import LoadOptions, load_packed_lm, plan_memory
from serving.models.memory_plan import MemoryPlan, PlannedItem
from serving.protocols import ScoreRequest
from serving.types import as_ids
from tests.models.tiny import VOCAB, tiny_model

OPTIONS = LoadOptions(
    role="target", dtype="float32", num_rows=2, max_length=100, prefill_chunk=64, vocab_size=VOCAB, max_draft=4
)
OTHER_BUILDS = (
    "gpt2", "gpt_neox", "falcon", "bloom", "mpt", "t5", "biogpt", "persimmon", "modernbert-decoder", "gpt_oss",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    return str(path)


def test_a_folder_loads_and_scores(folder: str) -> None:
    lm = load_packed_lm(folder, OPTIONS)
    ids = as_ids([5, 6, 7, 8])
    lm.open("a", ids)
    (table,) = lm.score([ScoreRequest("a", ids)])
    expected = tiny_model("llama")(torch.tensor([[5, 6, 7, 8]])).logits[0, -1]
    assert table is not None
    assert table.next_ids[0] == expected.argmax()


def test_case_27_the_plan_of_a_second_role_counts_the_first_ones_rows_and_workspace(folder: str) -> None:
    config, options = tiny_model("llama").config, replace(OPTIONS, role="first")
    first = plan_memory(config, options)
    lm = load_packed_lm(folder, options)
    (reserved,) = [item for item in plan_memory(config, OPTIONS).items if item.role == "first"]
    assert reserved.num_bytes == lm.store.untouched_bytes + first.bytes_for("workspace")
    assert lm.store.untouched_bytes == first.bytes_for("KV rows")


def test_the_plan_counts_weights_rows_and_workspace_without_loading() -> None:
    network = tiny_model("llama")
    plan = plan_memory(network.config, OPTIONS)
    sizes = {item.purpose: item.num_bytes for item in plan.items if item.role == "target"}
    assert sizes["weights"] == 4 * sum(p.numel() for p in network.parameters())
    assert sizes["KV rows"] == 4 * 3 * 2 * 2 * 16 * 2 * (100 + 4 + 1)  # bytes, layers, k and v, heads, dim, rows, slots
    assert plan.fits


def test_the_plan_counts_the_rows_of_every_session_that_catches_up_in_one_pass() -> None:
    config = tiny_model("llama").config

    def workspace(**fields: int) -> int:
        (item,) = [i for i in plan_memory(config, replace(OPTIONS, **fields)).items if i.purpose == "workspace"]
        return item.num_bytes // (4 * VOCAB)

    assert workspace(num_rows=16) == 16 * 5  # rows of logits
    assert workspace(num_rows=16, max_unseen=32) == 16 * (32 + 5)
    assert workspace(num_rows=16, max_unseen=4096) == 16 * (100 + 4 + 1)  # no session is longer than its row


def test_case_27_what_does_not_fit_is_refused_with_the_table(folder: str) -> None:
    with pytest.raises(MemoryPlanError, match=r"(?s)KV rows.*needed.*available"):
        load_packed_lm(folder, replace(OPTIONS, num_rows=512, max_length=512, max_draft=100_000_000))
    plan = MemoryPlan((PlannedItem("target", "weights", 95),), available=100)
    assert not plan.fits  # a tenth is kept free


def test_a_context_beyond_the_models_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="512 positions"):
        load_packed_lm(folder, replace(OPTIONS, max_length=513))


def test_what_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="could not be loaded") as caught:
        load_packed_lm(str(tmp_path), OPTIONS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", OTHER_BUILDS)
def test_families_of_another_build_are_refused_by_their_model_type(family: str) -> None:
    with pytest.raises(ModelError, match=f"^model type '{family}'"):
        plan_memory(AutoConfig.for_model(family, num_hidden_layers=2), OPTIONS)


@pytest.mark.parametrize("family", ["xglm", "diffllama"])
def test_attention_that_cannot_be_replaced_is_refused_by_the_first_pass(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    lm = load_packed_lm(str(tmp_path), OPTIONS)
    ids = as_ids([5, 6, 7, 8])
    lm.open("a", ids)
    with pytest.raises(ModelError, match=f"^model type '{family}' has attention of its own"):
        lm.score([ScoreRequest("a", ids)])
