"""Pairs of models: the same tokens or a refusal that names the first difference."""

from typing import Any

import numpy as np
import pytest
import torch

from serving.errors import ConfigError
from serving.models.hf_decoder import HFDecoder
from serving.models.kv_store import KVStore
from serving.models.packed_lm import HeadOptions, PackedLM
from serving.models.tokenizer import ChatTokenizer
from serving.models.vocabulary import check_same_vocabulary
from serving.protocols import ScoreRequest
from tests.models.tiny import VOCAB, tiny_model


class Words:
    """As much of a Hugging Face tokenizer as the check looks at."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def convert_ids_to_tokens(self, ids: range) -> list[str]:
        return [self.words[i] for i in ids]


def tokenizer(name: str, words: list[str]) -> ChatTokenizer:
    return ChatTokenizer(name, frozenset({0}), len(words), Words(words))


def test_case_23_padding_of_either_matrix_does_not_matter() -> None:
    check_same_vocabulary(target=tokenizer("a", ["x", "y"]), drafter=tokenizer("b", ["x", "y"]))
    logits = logits_with_padding(padding=9)
    assert (logits < VOCAB).all()


@pytest.mark.parametrize(
    ("theirs", "named"),
    [(["x", "z"], "id 1"), (["x"], "id 1"), (["x", "y", "w"], "id 2"), (["y", "x"], "id 0")],
)
def test_case_23_another_tokenizer_is_refused_by_its_first_difference(theirs: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_same_vocabulary(target=tokenizer("a", ["x", "y"]), drafter=tokenizer("b", theirs))


def logits_with_padding(*, padding: int) -> Any:
    """Argmax over a model whose padded rows of the head would always win."""
    network = tiny_model("llama", vocab_size=VOCAB + padding, tie_word_embeddings=False)
    network.lm_head.weight[VOCAB:] *= 100.0
    decoder = HFDecoder(network)
    lm = PackedLM(decoder, KVStore(decoder.shapes, 1, 64, torch.float32), head=HeadOptions(VOCAB), prefill_chunk=64)
    ids = np.arange(3, 40, dtype=np.int32)
    lm.open("a", ids)
    (table,) = lm.score([ScoreRequest("a", ids, num_rows=20)])
    assert table is not None
    return table.next_ids
