"""The guard of two sources: each pays for itself, and who does not pay is left off alone."""

from dataclasses import replace

import numpy as np
import pytest

from serving.decode.costs import CostModel
from serving.decode.guard import Guard
from serving.decode.source_guard import SourceGuard
from serving.types import EMPTY_DRAFT, Draft, DraftLimits, as_ids

COSTS = {1: 0.010, 8: 0.017, 16: 0.057}
LOOKUP_S = 0.0001


def make() -> SourceGuard:
    return SourceGuard(cache=Guard(CostModel(COSTS), max_draft=8), model=Guard(CostModel(COSTS), max_draft=4))


def cached(count: int) -> Draft:
    return Draft(as_ids([7] * count), "suffix")


def modelled(count: int) -> Draft:
    return Draft(as_ids([7] * count), "model")


def round_of(
    guard: SourceGuard, *, takes_cache: bool, cache_right: int, model_right: int, model_s: float
) -> DraftLimits:
    limits = guard.limits("s", 1, 10)
    uses_model = not takes_cache and limits.model > 0
    count = limits.model if uses_model else limits.cache
    draft = (modelled(count) if uses_model else cached(count)) if count else EMPTY_DRAFT
    guard.record_drafts({"s": draft}, LOOKUP_S + model_s * uses_model)
    guard.record_pass(rows=1 + count, verify_s=CostModel(COSTS).seconds(1 + count))
    if limits.most:
        guard.observe("s", 1, draft, min(count, model_right if uses_model else cache_right))
    return limits


def test_a_model_that_does_not_pay_is_left_off_and_the_cache_goes_on() -> None:
    guard = make()
    seen = [
        round_of(guard, takes_cache=turn % 2 == 0, cache_right=8, model_right=1, model_s=0.03) for turn in range(300)
    ]
    assert [limits.cache for limits in seen[20:]] == [8] * 280
    assert sum(limits.model > 0 for limits in seen[100:]) < 20


def test_a_cache_that_is_always_wrong_does_not_hold_the_model_up() -> None:
    guard = make()
    seen = [
        round_of(guard, takes_cache=turn % 2 == 0, cache_right=0, model_right=4, model_s=0.002) for turn in range(300)
    ]
    assert [limits.model for limits in seen[50:]] == [4] * 250
    assert sum(limits.cache > 0 for limits in seen[100:]) < 80


def test_a_model_is_charged_for_its_own_time_and_not_for_the_look_ups_of_others() -> None:
    charged: list[float] = []

    class Noting(Guard):
        def record_drafts(self, drafts, draft_s):  # type: ignore[no-untyped-def]
            charged.append(draft_s)

    guard = SourceGuard(cache=Guard(CostModel(COSTS), max_draft=8), model=Noting(CostModel(COSTS), max_draft=4))
    for name in "cab":  # not all may have the model read their text at once
        guard.limits(name, 3, 10)
    guard.record_drafts({name: cached(4) for name in "abc"}, 3 * LOOKUP_S)
    guard.record_drafts({"a": cached(4), "b": cached(4), "c": modelled(4)}, 2 * LOOKUP_S + 0.02)
    assert charged == pytest.approx([0.0, 0.02])


def test_no_draft_at_all_is_on_the_models_account_where_it_was_allowed() -> None:
    guard = make()
    for _ in range(2):  # the first may be part of a reading
        assert guard.limits("s", 1, 10).model > 0
        guard.record_drafts({"s": EMPTY_DRAFT}, 0.05)
        guard.observe("s", 1, EMPTY_DRAFT, 0)
    limits = guard.limits("s", 1, 10)
    assert (limits.cache > 0, limits.model) == (True, 0)


def test_the_model_s_rate_is_what_its_draft_emits_in_the_time_it_takes() -> None:
    model = Guard(CostModel(COSTS), max_draft=4, token_s=0.001)  # a row and a step: 0.2 plain tokens
    guard = SourceGuard(cache=Guard(CostModel(COSTS), max_draft=8), model=model)
    first = guard.limits("s", 1, 60)
    k = first.model
    assert first.row_price == pytest.approx(0.1)
    assert first.model_rate == pytest.approx((1 + sum(0.5**n for n in range(1, k + 1))) / (1 + 0.2 * k + 2.0))
    guard.record_drafts({"s": modelled(k)}, 0.001 * k + 0.006)  # 60 positions in 0.6 tokens
    guard.observe("s", 1, modelled(k), k)
    caught_up = guard.limits("s", 1, 61)
    a, most = (2.0 * 0.9 + k) / (4.0 * 0.9 + k), caught_up.model

    def expected(*, rounds: list[tuple[int, float]], reading: float = 0.0) -> float:
        """Of the belief before the first round and of all `rounds`; each weighs a tenth less with each later one."""
        weights = [0.9 ** len(rounds), *(0.9**later for later in reversed(range(len(rounds))))]
        won, spent = zip((sum(a**n for n in range(1, most + 1)), 0.2 * most), *rounds, strict=True)
        return (1 + np.average(won, weights=weights)) / (1 + np.average(spent, weights=weights) + reading)

    rounds = [(k, 0.2 * k)]
    assert caught_up.model_rate == pytest.approx(expected(rounds=rounds))
    guard.record_drafts({"s": cached(2)}, LOOKUP_S)
    guard.observe("s", 1, cached(2), 2)
    behind = guard.limits("s", 1, 64)  # its last draft stood on 60
    assert behind.model == most
    assert behind.model_rate == pytest.approx(expected(rounds=rounds, reading=4 * 0.01), rel=1e-3)


def test_the_model_s_rate_is_that_of_drafts_which_end_early() -> None:
    model = Guard(CostModel(COSTS), max_draft=4, token_s=0.001)
    guard = SourceGuard(cache=Guard(CostModel(COSTS), max_draft=8), model=model)
    for turn in range(60):  # half of the rounds end with a doubtful first token, the others with one that is right
        assert guard.limits("s", 1, 60 + turn).model > 0
        count = turn % 2
        guard.record_drafts({"s": replace(modelled(count), num_passes=count + 1)}, 0.001 * (count + 1))
        guard.observe("s", 1, modelled(count), count)
    rate = guard.limits("s", 1, 121).model_rate
    assert rate == pytest.approx((1 + 0.5) / (1 + 0.5 * 0.1 + 1.5 * 0.1), rel=0.03)


def test_what_asking_takes_is_not_taken_for_the_price_of_a_token() -> None:
    model = Guard(CostModel(COSTS), max_draft=4, ask_s=0.002, token_s=0.001, is_judged=True)
    floor = model.limits("s", 1, 60).model_floor
    for turn in range(60):  # the machine becomes twice as slow, and drafts seldom have more than a token
        count = 4 if turn % 8 == 0 else 1
        model.record_drafts({"s": modelled(count)}, 2 * (0.002 + 0.001 * count) + 0.6 * (turn == 0))
        model.observe("s", 1, modelled(count), count)
        model.limits("s", 1, 61 + turn)
    twice = model.limits("s", 1, 200).model_floor
    assert twice - floor == pytest.approx(0.1, rel=0.1)


def test_a_model_that_knows_how_likely_its_tokens_are_ends_drafts_where_they_do_not_pay() -> None:
    model = Guard(CostModel(COSTS), max_draft=4, token_s=0.001, is_judged=True)
    guard = SourceGuard(cache=Guard(CostModel(COSTS), max_draft=8), model=model)
    for turn in range(20):
        limits = guard.limits("s", 1, 60 + turn)
        assert limits.model == 4  # though the second token is never right
        assert limits.model_floor == pytest.approx(0.1 + 0.1)
        guard.record_drafts({"s": replace(modelled(1), num_passes=2)}, 0.001 * 2)
        guard.observe("s", 1, modelled(1), 1)
    loaded = guard.limits("s", 8, 81)
    assert loaded.model_floor == pytest.approx(CostModel(COSTS).price(8, 40) + 0.001 * 8 / 0.017)
    sampled = guard.limits("s", 1, 82, is_greedy=False)  # its noise decides together with the target's
    assert sampled.model_floor == 0.0
    assert 0 < sampled.model <= 4


def test_where_no_model_may_draft_its_rate_is_plain_decoding_s() -> None:
    guard = make()
    while guard.limits("s", 1, 10).model:
        guard.record_drafts({"s": modelled(4)}, 0.05)
        guard.observe("s", 1, modelled(4), 0)
    assert guard.limits("s", 1, 10).model_rate == 1.0


def test_sessions_are_forgotten() -> None:
    guard = make()
    guard.limits("s", 1, 10)
    guard.observe("s", 1, modelled(2), 0)
    guard.forget("s")
    assert guard._limits == {}
