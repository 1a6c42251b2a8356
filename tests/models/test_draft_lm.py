"""A draft LM under its reduced head, and under the target's whole one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from serving.errors import ModelError
from serving.models.draft_lm import load_draft_model, load_whole_draft_lm
from tests.models.tiny import VOCAB, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

TARGET_IDS = torch.arange(0, VOCAB, 3, dtype=torch.int32)


@pytest.fixture
def draft(tmp_path: Path) -> str:
    """One layer of a tiny Llama whose head is not tied."""
    return write_draft(tmp_path, tie_word_embeddings=False)


def write_draft(folder: Path, **overrides: object) -> str:
    tiny_model("llama", **overrides).save_pretrained(folder / "base")
    student = tiny_model("llama", seed=1, num_hidden_layers=1, tie_word_embeddings=False)
    own = {
        name: tensor.contiguous()
        for name, tensor in student.named_parameters()
        if name.startswith(("model.layers.", "model.norm."))
    }
    student.config.save_pretrained(folder / "draft")
    save_file(own | {"target_ids": TARGET_IDS}, folder / "draft" / "model.safetensors")
    (folder / "draft" / "draft.json").write_text(json.dumps({"base": str(folder / "base")}))
    return str(folder / "draft")


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_whole_head_says_the_same_and_has_the_stock_shapes(tmp_path: Path, is_tied: bool) -> None:
    draft = write_draft(tmp_path, tie_word_embeddings=is_tied)
    reduced, whole = load_draft_model(draft, torch.float32), load_whole_draft_lm(draft, torch.float32)
    stock = tiny_model("llama", num_hidden_layers=1, tie_word_embeddings=False)
    assert type(whole) is type(stock)
    assert shapes(whole) == shapes(stock)
    ids = torch.arange(3, 23)[None]
    logits = whole(ids).logits
    assert logits.shape == (1, 20, VOCAB)
    torch.testing.assert_close(logits[..., TARGET_IDS.long()], reduced.network(ids).logits)


def shapes(network: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in network.state_dict().items()}


def test_it_assists_the_stock_loop_without_changing_its_ids(draft: str, tmp_path: Path) -> None:
    target, assistant = tiny_model("llama", tie_word_embeddings=False), load_whole_draft_lm(draft, torch.float32)
    options = {"attention_mask": torch.ones(1, 5), "max_new_tokens": 12, "do_sample": False}
    ids = torch.tensor([[5, 9, 11, 3, 17]])
    expected = target.generate(ids, **options)
    assert target.generate(ids, assistant_model=assistant, **options).tolist() == expected.tolist()


def test_a_folder_with_a_tensor_missing_is_one_line(draft: str) -> None:
    save_file({"target_ids": TARGET_IDS}, Path(draft) / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing \['model\.layers\.0"):
        load_whole_draft_lm(draft, torch.float32)
