"""Score tables: read of the logits by compiled code or by torch, the same numbers."""

import numpy as np
import pytest
import torch

import serving.models.draws
import serving.models.scores
from serving.models.scores import score_tables
from serving.protocols import ScoreRequest
from serving.requests import Sampling
from serving.types import ScoreTable, as_ids

REQUESTS = [
    ScoreRequest("greedy", as_ids([1, 2, 3, 7]), num_rows=3),
    ScoreRequest("sampled", as_ids([1, 2, 9]), num_rows=2, sampling=Sampling(temperature=0.8, top_k=5, seed=3)),
    ScoreRequest("alone", as_ids([4, 4])),
]


def tables(logits: torch.Tensor, id_map: torch.Tensor | None, *, with_logsumexp: bool) -> list[ScoreTable]:
    return score_tables(logits.clone(), REQUESTS, id_map=id_map, with_logsumexp=with_logsumexp)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("with_logsumexp", [False, True])
@pytest.mark.parametrize("is_reduced", [False, True])
def test_torch_reads_what_compiled_code_does(
    monkeypatch: pytest.MonkeyPatch, is_reduced: bool, with_logsumexp: bool
) -> None:
    torch.manual_seed(0)
    logits = torch.randint(-40, 40, (6, 333)).float() / 8  # with equals
    id_map = torch.randperm(2000)[:333] if is_reduced else None
    found = tables(logits, id_map, with_logsumexp=with_logsumexp)
    for module in (serving.models.scores, serving.models.draws):
        monkeypatch.setattr(module, "kernels_for", lambda _: None)
    for one, other in zip(found, tables(logits, id_map, with_logsumexp=with_logsumexp), strict=True):
        for name in ("draft_ids", "next_ids", "next_logits", "top_ids", "top_logits", "draft_logits"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        assert (one.logsumexp is None) == (other.logsumexp is None) == (not with_logsumexp)
        if one.logsumexp is not None and other.logsumexp is not None:
            np.testing.assert_allclose(one.logsumexp, other.logsumexp, rtol=1e-6)
