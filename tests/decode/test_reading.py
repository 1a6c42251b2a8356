"""Reading a text for its first draft: an investment of all sessions, within the bound on what speculation may cost.

Time is simulated: passes cost what COSTS says, and a drafter reads before its first draft.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.decode.costs import CostModel
from serving.decode.guard import ALLOWANCE, CREDIT, Guard
from serving.types import EMPTY_DRAFT, Draft, as_ids

COSTS = {1: 0.010, 8: 0.017, 16: 0.057, 64: 0.297}
MOST_OWED = 4.0  # tokens that the fund may be in debt
MOST_ROUND = 8.0  # tokens: the dearest draft of these tests, beyond its reading


@dataclass
class Drafting:
    """What a drafter takes to read a text and for each token, in seconds, and how many of its tokens are right."""

    read_s: float
    step_s: float = 0.0005
    right: int = 2
    rounds_of_reading: int = 1


@dataclass
class Spent:
    """One session at a time on a clock that only work moves."""

    seconds: float = 0.0
    tokens: int = 0
    drafts: int = 0
    readings: int = 0
    batch_size: int = 1  # the sessions beside it decode plainly

    @property
    def token_s(self) -> float:
        """Time per token of plain decoding."""
        return CostModel(COSTS).seconds(self.batch_size) / self.batch_size

    @property
    def ratio(self) -> float:
        """Time per token by that of plain decoding."""
        return self.seconds / (self.token_s * self.tokens)


def make_guard() -> Guard:
    return Guard(CostModel(COSTS), max_draft=4)


def serve(guard: Guard, num_tokens: int, drafting: Drafting, spent: Spent, name: str) -> Spent:
    """Answer one request."""
    left, unread, others, costs = num_tokens, drafting.rounds_of_reading, spent.batch_size - 1, CostModel(COSTS)
    while left > 0:
        k = guard.limit(name, spent.batch_size, 10)
        draft, draft_s = EMPTY_DRAFT, 0.0
        if k and unread:
            draft_s += drafting.read_s / drafting.rounds_of_reading
            unread -= 1
            spent.readings += unread == 0
        if k and not unread:
            draft = Draft(as_ids([7] * k), "eagle3")
            draft_s += drafting.step_s * k
            spent.drafts += 1
        guard.record_drafts({name: draft} if k else {}, draft_s)
        verify_s = costs.seconds(1 + len(draft) + others)
        guard.record_pass(rows=1 + len(draft) + others, verify_s=verify_s)
        kept = min(len(draft), drafting.right, left - 1)
        if k:
            guard.observe(name, spent.batch_size, draft, kept)
        spent.seconds += draft_s + verify_s - others * spent.token_s
        spent.tokens += 1 + kept
        left -= 1 + kept
    guard.forget(name)
    return spent


def serve_all(lengths: list[int], drafting: Drafting) -> Spent:
    guard, spent = make_guard(), Spent()
    for number, length in enumerate(lengths):
        serve(guard, length, drafting, spent, str(number))
    return spent


@pytest.mark.parametrize("rounds_of_reading", [1, 4])
def test_a_reading_is_not_held_against_the_drafts_that_follow(rounds_of_reading: int) -> None:
    drafting = Drafting(read_s=0.05, rounds_of_reading=rounds_of_reading)  # five plain tokens
    spent = serve_all([96], drafting)
    assert spent.readings == 1
    assert spent.drafts >= 0.8 * 96 / 3
    assert spent.ratio < 0.65


def test_what_the_first_session_gained_pays_for_the_next_to_read() -> None:
    spent = serve_all([96] * 20, Drafting(read_s=0.05))
    assert spent.readings == 20
    assert spent.ratio < 0.6


@pytest.mark.parametrize(
    ("length", "drafting"),
    [
        (64, Drafting(read_s=0.08, right=0)),  # never right
        (12, Drafting(read_s=0.08, right=1)),  # right, but answers are too short to pay for the reading
        (64, Drafting(read_s=0.0, step_s=0.02, right=1)),  # each draft costs two tokens and gives one
        (64, Drafting(read_s=0.3, right=0, rounds_of_reading=3)),
    ],
)
def test_case_30_time_per_token_is_within_a_twentieth_of_plain_with_what_is_read(
    length: int, drafting: Drafting
) -> None:
    spent = serve_all([length] * 200, drafting)
    assert spent.ratio <= 1.05


def test_case_30_a_drafter_that_becomes_worthless_stops_reading() -> None:
    guard, spent = make_guard(), Spent()
    for number in range(20):
        serve(guard, 96, Drafting(read_s=0.05), spent, f"good {number}")
    later = Spent()
    for number in range(100):
        serve(guard, 64, Drafting(read_s=0.05, right=0), later, f"bad {number}")
    assert later.readings < 30
    assert later.ratio <= 1.05


def test_where_readings_do_not_pay_trials_become_rare_and_go_on() -> None:
    guard, crowded = make_guard(), Spent(batch_size=16)
    for number in range(100):
        serve(guard, 96, Drafting(read_s=0.05, right=0), crowded, f"first {number}")
    later = Spent(batch_size=16)
    for number in range(400):
        serve(guard, 96, Drafting(read_s=0.05, right=0), later, f"later {number}")
    assert later.readings >= 2
    assert later.ratio <= 1 + ALLOWANCE / 4
    alone = serve(guard, 96, Drafting(read_s=0.05), Spent(), "alone")
    assert alone.readings == 1  # what did not pay in a crowd says nothing of a session by itself


def test_a_drafter_that_becomes_good_is_found_out_where_trials_were_rare() -> None:
    guard, spent = make_guard(), Spent()
    for number in range(200):
        serve(guard, 96, Drafting(read_s=0.05, right=0), spent, f"bad {number}")
    later = Spent()
    for number in range(60):
        serve(guard, 96, Drafting(read_s=0.05, right=4), later, f"good {number}")
    assert later.readings >= 30


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 4), st.integers(0, 10)), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.0005, 0.01]),
    st.integers(1, 3),
)
def test_whatever_happens_the_loss_with_all_readings_is_bounded(
    sessions: list[tuple[int, int, int]], step_s: float, rounds_of_reading: int
) -> None:
    guard, spent, dearest = make_guard(), Spent(), 0.0
    for number, (length, right, read_tokens) in enumerate(sessions):
        drafting = Drafting(COSTS[1] * read_tokens, step_s, right, rounds_of_reading)
        serve(guard, length, drafting, spent, str(number))
        dearest = max(dearest, read_tokens)
    lost = spent.seconds / COSTS[1] - spent.tokens
    of_all = CREDIT + ALLOWANCE * spent.tokens + MOST_OWED + dearest
    of_the_last_to_draft = CREDIT + ALLOWANCE * 60 + MOST_ROUND
    assert lost <= of_all + of_the_last_to_draft


def test_many_that_start_together_do_not_all_read_before_it_is_known_what_that_costs() -> None:
    guard = make_guard()

    def may_draft(names: Callable[[int], str]) -> list[str]:
        return [names(number) for number in range(16) if guard.limit(names(number), 16, 10)]

    first = may_draft(str)
    assert 1 <= len(first) <= 2
    guard.record_drafts({name: Draft(as_ids([7]), "eagle3") for name in first}, 0.05)
    for name in first:
        guard.observe(name, 16, Draft(as_ids([7]), "eagle3"), 0)
    assert set(may_draft(str)) <= set(first)
