"""Drawn tokens: the native kernel against torch, the filters against their definitions, the distribution itself."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from serving.models import draws
from serving.models.draws import RowDraw, draw
from serving.models.noise import noise_keys
from serving.models.scores import score_tables
from serving.protocols import ScoreRequest
from serving.requests import Sampling
from serving.rules.prefix import accept_prefix
from serving.rules.strict import StrictRule
from serving.types import Ledger, ScoreTable, Verdict, as_ids

FILTERS = [
    Sampling(0.7),
    Sampling(1.3, top_k=1),
    Sampling(1.0, top_k=5),
    Sampling(0.8, top_p=0.5),
    Sampling(1.0, top_p=1e-6),
    Sampling(1.5, top_p=0.999),
    Sampling(1.0, min_p=0.2),
    Sampling(2.0, top_k=40, top_p=0.8, min_p=0.02),
]


def by_definition(row: Tensor, sampling: Sampling) -> set[int]:
    """The ids that the filters leave, one after the other."""
    p = torch.softmax(row.double() / sampling.temperature, dim=0)
    kept = p >= sampling.min_p * p.max()
    if sampling.top_k:
        kept &= p >= p[kept].topk(min(sampling.top_k, int(kept.sum()))).values[-1]
    if sampling.top_p < 1:
        order = [int(i) for i in p.argsort(descending=True) if kept[i]]
        mass, nucleus = 0.0, set()
        for i in order:
            nucleus.add(i)
            mass += float(p[i])
            if mass >= sampling.top_p * float(p[kept].sum()):
                break
        return nucleus
    return set(kept.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [7, 8, 1003])
def test_only_what_the_filters_leave_is_drawn(sampling: Sampling, vocab: int) -> None:
    torch.manual_seed(vocab)
    row = torch.randn(1, vocab) * 3
    allowed = by_definition(row[0], sampling)
    found = draw(row, [RowDraw(0, sampling, noise_keys(5, position)) for position in range(3000)], None)
    seen = set(found.tolist())
    assert seen <= allowed
    if len(allowed) <= 5:
        p = torch.softmax(row[0].double() / sampling.temperature, dim=0)
        assert {i for i in allowed if p[i] > 0.01 * sum(p[j] for j in allowed)} <= seen


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_the_kernel_draws_what_torch_draws(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    rows = torch.randn(4, 500) * 2
    wanted = [RowDraw(i % 4, sampling, noise_keys(9, i)) for i in range(200)]
    reduced = torch.arange(500) * 3 + 1
    for id_map in (None, reduced):
        by_kernel = draw(rows, wanted, id_map)
        with monkeypatch.context() as patch:
            patch.setattr(draws, "kernels_for", lambda _: None)
            assert torch.equal(draw(rows, wanted, id_map), by_kernel)


def test_torch_draws_from_many_rows_what_it_draws_from_each(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    rows = torch.randn(5, 300) * 2
    rows[3, 17:] = -math.inf
    wanted = [RowDraw(i % 5, FILTERS[i % len(FILTERS)], noise_keys(4, i)) for i in range(400)]
    monkeypatch.setattr(draws, "kernels_for", lambda _: None)
    assert torch.equal(draw(rows, wanted, None), torch.cat([draw(rows, [one], None) for one in wanted]))


def test_torch_draws_without_waiting_for_the_device() -> None:
    """A tensor without values is one that nobody can wait for."""
    wanted = [RowDraw(i % 4, sampling, noise_keys(4, i)) for i, sampling in enumerate(FILTERS)]
    assert draw(torch.empty(4, 300, device="meta"), wanted, None).shape == (len(FILTERS),)


def test_a_reduced_vocabulary_draws_with_the_noise_of_the_target_ids() -> None:
    full = torch.full((1, 900), -math.inf)
    ids = torch.tensor([5, 17, 400, 899])
    full[0, ids] = torch.tensor([1.0, 2.0, 0.5, 1.5])
    wanted = [RowDraw(0, Sampling(1.0), noise_keys(3, position)) for position in range(300)]
    assert torch.equal(ids[draw(full[:, ids].contiguous(), wanted, ids)], draw(full, wanted, None))


P = torch.log(torch.tensor([0.02, 0.3, 0.05, 0.2, 0.13, 0.1, 0.15, 0.05]))
Q = torch.log(torch.tensor([0.3, 0.02, 0.2, 0.05, 0.1, 0.13, 0.05, 0.15]))
NUM_DRAWS = 100_000
# The 0.999 quantile of chi-square with 7 degrees of freedom.
CRITICAL = 24.3

Judge = Callable[[ScoreTable], Verdict]


def strict(table: ScoreTable) -> Verdict:
    return StrictRule().judge(table, Ledger())


def always_accept(table: ScoreTable) -> Verdict:
    return accept_prefix(table, np.ones(len(table.draft_ids), dtype=bool))


def first_tokens(temperature: float, draft_logits: Tensor, *, is_coupled: bool, judge: Judge) -> list[int]:
    """The first token emitted in each of NUM_DRAWS rounds with one drafted token."""
    keys = [noise_keys(seed if is_coupled else seed + NUM_DRAWS, 4) for seed in range(NUM_DRAWS)]
    drafted = draw(draft_logits[None], [RowDraw(0, Sampling(temperature), key) for key in keys], None).tolist()
    found: list[int] = []
    for start in range(0, NUM_DRAWS, 1000):
        requests = [
            ScoreRequest("a", as_ids([1, 2, 3, 6, drafted[seed]]), num_rows=2, sampling=Sampling(temperature, seed))
            for seed in range(start, start + 1000)
        ]
        for table in score_tables(P.repeat(2000, 1), requests):
            verdict = judge(table)
            found.append(int(table.draft_ids[0]) if verdict.num_accepted else int(verdict.next_id or 0))
    return found


def chi_square(found: list[int], temperature: float) -> float:
    expected = torch.softmax(P / temperature, dim=0) * NUM_DRAWS
    counts = torch.bincount(torch.tensor(found), minlength=len(P))
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    ("draft_logits", "is_coupled"), [(P + 0.3 * Q, True), (Q, False)], ids=["near and coupled", "other and not"]
)
def test_case_10_the_output_has_the_target_distribution(
    temperature: float, draft_logits: Tensor, is_coupled: bool
) -> None:
    found = first_tokens(temperature, draft_logits, is_coupled=is_coupled, judge=strict)
    assert chi_square(found, temperature) < CRITICAL


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_case_10_a_rule_that_accepts_everything_is_found_out(temperature: float) -> None:
    found = first_tokens(temperature, Q, is_coupled=False, judge=always_accept)
    assert chi_square(found, temperature) > 10 * CRITICAL
