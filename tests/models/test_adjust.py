"""Adjusted logits: by definition, and to the bit whatever part of the text was drafted."""

import math

import pytest
import torch

from serving.models.adjust import adjust
from serving.models.scores import score_tables
from serving.protocols import ScoreRequest
from serving.requests import Sampling
from serving.types import as_ids

VOCAB = 50
PROMPT = [3, 4, 5]
OUTPUT = [7, 7, 9, 7, 11, 9, 7]


def rows(sampling: Sampling, num_drafted: int, logits: torch.Tensor) -> torch.Tensor:
    """`logits` for every position behind the prompt's last, scored in blocks of num_drafted + 1."""
    found, ids = [], [*PROMPT, *OUTPUT]
    at = len(PROMPT)
    while at <= len(ids):
        size = min(num_drafted + 1, len(ids) - at + 1)
        block = logits[at - len(PROMPT) : at - len(PROMPT) + size].clone()
        request = ScoreRequest("a", as_ids(ids[: at + size - 1]), size, sampling, prompt_len=len(PROMPT))
        adjust(block, request)
        found.append(block)
        at += size
    return torch.cat(found)


@pytest.mark.parametrize("num_drafted", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(frequency_penalty=0.3, presence_penalty=0.1),
        Sampling(frequency_penalty=-0.7, presence_penalty=1.3, logit_bias=((7, 0.1), (40, -3.0))),
        Sampling(min_tokens=4, held_ids=(2, 9)),
    ],
    ids=str,
)
def test_a_row_is_the_same_bits_however_its_text_was_drafted(sampling: Sampling, num_drafted: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(OUTPUT) + 1, VOCAB) * 5
    assert torch.equal(rows(sampling, num_drafted, logits), rows(sampling, 0, logits))


def test_the_definition() -> None:
    logits = torch.zeros(len(OUTPUT) + 1, VOCAB)
    sampling = Sampling(
        frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((9, 1.0), (VOCAB + 3, 5.0)), min_tokens=2,
        held_ids=(2, VOCAB + 9),
    )  # fmt: skip
    found = rows(sampling, 0, logits)
    last = found[-1]
    assert (last[7], last[9], last[11], last[3]) == (-(4 * 0.5 + 0.25), 1 - (2 * 0.5 + 0.25), -0.75, 0.0)
    assert [row[2] == -math.inf for row in found] == [True, True, *[False] * 6]


def test_regret_is_of_the_adjusted_distribution_and_log_probabilities_of_the_models_own() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 0.0]])
    bias = Sampling(logit_bias=((0, 4.0),))
    request = ScoreRequest("a", as_ids([9, 1]), 2, bias, prompt_len=1, num_logprobs=0)
    (table,) = score_tables(logits.clone(), [request])
    assert (table.next_ids[0], table.draft_ids[0], table.regret[0]) == (0, 1, 2.0)  # 4 - 2, not 0
    assert table.logprobs is not None
    assert table.logprobs.draft[0] - table.logprobs.next[0] == pytest.approx(2.0)  # the model prefers the drafted one
