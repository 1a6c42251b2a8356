"""K by measured costs: what is chosen, what is scored, and what speculation may lose at most."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.decode.costs import CostModel
from serving.decode.guard import ALLOWANCE, CREDIT, MOST_LENT, Guard
from serving.decode.offline import complete
from serving.protocols import DraftRequest
from serving.types import EMPTY_DRAFT, Draft, as_ids
from tests.decode.scripted import ScriptedDrafter, ScriptedModel, arithmetic, make_scheduler, oracle, plain, request

# A pass of one row costs 10 ms; up to 8 rows each more costs 1 ms, beyond that 5 ms: compute takes over.
COSTS = {1: 0.010, 8: 0.017, 16: 0.057, 64: 0.297}


def make_guard(
    max_draft: int = 8, ask_s: float = 0.0, costs: dict[int, float] | None = None, *, is_judged: bool = False
) -> Guard:
    guard = Guard(CostModel(costs or COSTS), max_draft=max_draft, is_judged=is_judged)
    if ask_s:  # of a session that is unknown, so that none of it is taken for reading
        guard.record_drafts({"other": EMPTY_DRAFT}, ask_s)
    return guard


def drafted(count: int) -> Draft:
    return Draft(as_ids([7] * count), "model")


def test_costs_are_interpolated_followed_and_extrapolated() -> None:
    costs = CostModel(COSTS)
    assert costs.seconds(4.5) == pytest.approx(0.0135)
    assert costs.seconds(128) == pytest.approx(0.617)
    assert costs.price(1, 2) == pytest.approx(0.1)
    assert costs.price(8, 16) == pytest.approx((0.057 - 0.017) / 0.017)
    assert costs.price(4, 16) == pytest.approx((0.057 - 0.013) / 0.013 * 4 / 12)
    assert costs.price(4, 4) == 0.0
    assert costs.next_price(8, 8) == pytest.approx((0.057 - 0.017) / 0.017)
    for _ in range(200):
        costs.record(9, 2 * 0.022)
    assert costs.seconds(9) == pytest.approx(0.044, rel=0.02)


def test_one_pass_that_is_held_up_hardly_moves_the_costs() -> None:
    costs = CostModel(COSTS)
    costs.record(8, 5.0)
    assert costs.seconds(8) < 0.017 * 1.3


def test_a_machine_that_becomes_slower_is_followed_at_every_row_count() -> None:
    costs = CostModel(COSTS)
    for _ in range(400):
        costs.record(4, 3 * 0.013)
    assert costs.seconds(1) == pytest.approx(0.03, rel=0.2)


def learn(guard: Guard, accepted: int, *, rounds: int = 60, batch_size: int = 1) -> list[int]:
    """K chosen in each round for a session whose drafts are right for `accepted` tokens."""
    chosen = []
    for _ in range(rounds):
        k = guard.limit("s", batch_size, 10)
        chosen.append(k)
        rows = batch_size * (1 + k)
        guard.record_pass(rows=rows, verify_s=CostModel(COSTS).seconds(rows))
        if k:
            guard.observe("s", batch_size, drafted(k), min(k, accepted))
    return chosen


def test_drafts_that_are_right_get_the_whole_k_and_at_once() -> None:
    chosen = learn(make_guard(), 8)
    assert all(k >= 3 for k in chosen)
    assert chosen[10:] == [8] * 50


def test_k_follows_how_far_drafts_are_right() -> None:
    assert set(learn(make_guard(), 2)[20:]) <= {2, 3, 4, 5}


def test_k_is_shorter_where_each_token_takes_a_model_s_pass() -> None:
    cheap, dear = make_guard(), make_guard()
    for guard, token_s in ((cheap, 0.0), (dear, 0.003)):  # a plain token takes 0.01
        for _ in range(60):
            k = guard.limit("s", 1, 10)
            guard.record_pass(rows=1 + k, verify_s=CostModel(COSTS).seconds(1 + k))
            if k:
                guard.record_drafts({"s": drafted(k)}, token_s * k)
                guard.observe("s", 1, drafted(k), min(k, 1))
    assert 1 <= dear.limit("s", 1, 10) < cheap.limit("s", 1, 10)


def test_drafts_that_are_wrong_get_the_allowance_and_no_more() -> None:
    chosen = learn(make_guard(), 0, rounds=400)
    assert sum(chosen) * 0.1 <= CREDIT + 400 * ALLOWANCE + 0.8
    assert chosen[100:].count(0) > 200


def test_k_falls_to_zero_as_the_batch_grows_and_comes_back() -> None:
    guard = make_guard()
    learn(guard, 3)
    alone = guard.limit("s", 1, 10)
    crowded = learn(guard, 3, rounds=200, batch_size=8)  # a row costs 2.4 tokens there
    assert alone >= 3
    assert crowded[20:].count(0) > 160
    assert max(learn(guard, 3, rounds=60)[30:]) >= 3


def test_a_slow_drafter_is_left_alone_and_taken_up_again_when_it_is_fast() -> None:
    guard = make_guard(ask_s=0.05)  # five plain tokens for at most three
    assert learn(guard, 3, rounds=300)[50:].count(0) > 230
    for _ in range(100):
        guard.record_drafts({"s": EMPTY_DRAFT}, 0.001)
    assert learn(guard, 3, rounds=300)[-20:].count(0) == 0


def test_new_sessions_start_with_what_others_have_learnt() -> None:
    guard = make_guard(ask_s=0.02)  # an attempt costs two tokens
    trials = []
    for number in range(64):
        name, num_trials = f"s{number}", 0
        for _ in range(60):
            k = guard.limit(name, 1, 10)
            num_trials += k > 0
            if k:
                guard.observe(name, 1, drafted(k), 0)
        guard.forget(name)
        trials.append(num_trials)
    assert trials[0] == 1
    assert sum(trials[1:]) <= 64 / 16 + 1  # by what is lent before anybody gained
    guard.limit("good", 1, 10)
    for _ in range(60):  # one that gets credit all the same, and whose drafts are right
        guard.observe("good", 1, drafted(8), 8)
    assert guard.limit("new", 1, 10) >= 1


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=300), st.integers(1, 16), st.floats(0.0, 0.1),
    st.booleans(),
)  # fmt: skip
def test_whatever_happens_a_session_loses_no_more_than_its_credit(
    outcomes: list[tuple[int, int]], batch_size: int, ask_s: float, is_judged: bool
) -> None:
    guard, costs, balance, dearest = make_guard(ask_s=ask_s, is_judged=is_judged), CostModel(COSTS), 0.0, 0.0
    for right, likely in outcomes:
        limits = guard.limits("s", batch_size, 10)
        assert (limits.model_floor > 0.0) == is_judged
        if limits.model:
            k = min(limits.model, likely) if is_judged else limits.model
            accepted = min(k, right)
            guard.observe("s", batch_size, drafted(k), accepted)
            cost = k * costs.price(batch_size, batch_size + k) + costs.plain_tokens(ask_s, batch_size)
            balance += accepted - cost
            dearest = max(dearest, cost)
    assert balance >= -(CREDIT + MOST_LENT + ALLOWANCE * len(outcomes) + dearest) - 1e-6


def test_case_30_wrong_drafts_cost_hardly_a_row_and_right_ones_are_all_scored() -> None:
    """Rows that the model scores through the whole loop, not time."""
    for right, least, most in ((0, 300, 306 * 1.05), (99, 0, 340)):
        model = ScriptedModel(arithmetic)
        scheduler = make_scheduler(
            model, oracle(arithmetic, right=right), max_draft=8, max_length=400, policy=make_guard()
        )
        found = next(iter(complete(scheduler, [request("a", max_tokens=300)])))
        assert found.output_ids == plain(arithmetic, (5, 9), 300)
        assert least <= sum(model.rows) <= most


def test_case_30_a_session_at_k_zero_asks_its_drafter_for_nothing() -> None:
    asked: list[int] = []

    def guess(request_: DraftRequest) -> list[int]:
        asked.append(request_.max_draft)
        time.sleep(0.02)  # two tokens of plain decoding
        return [1] * request_.max_draft

    scheduler = make_scheduler(ScriptedModel(arithmetic), ScriptedDrafter(guess), max_length=400, policy=make_guard())
    list(complete(scheduler, [request("a", max_tokens=300)]))
    assert len(asked) <= 2 + 300 * ALLOWANCE / 2
    assert 0 not in asked


@pytest.mark.parametrize("concurrency", [1, 4, 16, 32, 64])
def test_case_30_at_every_load_rows_stay_within_what_pays(concurrency: int) -> None:
    """Drafts right half of the time; rows are priced as COSTS says, and the batch's time is never 5 % over plain."""
    rng = random.Random(concurrency)
    costs, guard, spent_s, emitted = CostModel(COSTS), make_guard(), 0.0, 0
    for _ in range(400):
        limits = {str(session): guard.limit(str(session), concurrency, 10) for session in range(concurrency)}
        rows = concurrency + sum(limits.values())
        spent_s += costs.seconds(rows)
        guard.record_pass(rows=rows, verify_s=costs.seconds(rows))
        for session, k in limits.items():
            accepted = next((i for i in range(k) if rng.random() >= 0.5), k)
            emitted += 1 + accepted
            if k:
                guard.observe(session, concurrency, drafted(k), accepted)
    assert spent_s <= 1.05 * emitted * costs.seconds(concurrency) / concurrency
