"""The DIMR cost: literal rows, and when it is zero."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.dimr import ALPHA, BETA, Agreement, compare, dimr, mean

SIZE = 6
masses = st.lists(st.floats(0.01, 1.0), min_size=SIZE, max_size=SIZE)


def log_row(values: list[float]):
    row = np.array([values], dtype=np.float32)
    return np.log(row / row.sum())


def by_the_formula(log_q, log_slim) -> float:
    total = 0.0
    for q, p in zip(np.exp(log_q[0]).tolist(), np.exp(log_slim[0]).tolist(), strict=True):
        total += p * max(0.0, math.log(1 - ALPHA) + math.log(p / q)) + q * max(0.0, math.log(BETA) + math.log(p / q))
    return total


@given(masses, masses)
def test_it_is_the_formula_token_by_token(one: list[float], other: list[float]) -> None:
    assert dimr(log_row(one), log_row(other))[0] == pytest.approx(
        by_the_formula(log_row(one), log_row(other)), abs=1e-4
    )


@given(masses, masses)
def test_it_is_zero_iff_no_token_is_much_likelier_than_the_target_has_it(one: list[float], other: list[float]) -> None:
    excess = float(np.max(np.exp(log_row(other) - log_row(one)))) * max(1 - ALPHA, BETA)
    cost = float(dimr(log_row(one), log_row(other))[0])
    if abs(excess - 1.0) > 1e-3:
        assert (cost > 0.0) == (excess > 1.0)


def test_agreement_is_a_mean_over_rows_however_they_are_cut() -> None:
    rng = np.random.default_rng(0)
    q, slim = (np.concatenate([log_row(rng.random(9).tolist()) for _ in range(10)]) for _ in range(2))
    whole = compare(q, slim)
    cut = mean([(7, compare(q[:7], slim[:7])), (3, compare(q[7:], slim[7:]))])
    assert (whole.cost, whole.kl, whole.top1) == pytest.approx((cut.cost, cut.kl, cut.top1))
    assert whole.cost == pytest.approx(float(dimr(q, slim).mean()))
    assert whole.top1 == float((q.argmax(axis=1) == slim.argmax(axis=1)).mean())
    assert compare(q, q) == Agreement(0.0, 0.0, 1.0)
