"""Both halves of the drafter protocol against each other; calls are lost, late or meant for another."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from serving.deploy.messages import MAX_IDS_BYTES, DraftAnswer, DraftCall, DraftItem, OutcomeItem
from serving.deploy.sync import SessionSync
from serving.deploy.table import DraftTable
from serving.protocols import DraftRequest, Outcome
from serving.requests import Sampling
from serving.types import EMPTY_DRAFT, as_ids
from tests.deploy.fakes import SpyDrafter


def request(session_id="s", ids=(1, 2, 3), *, prompt_len=2, max_draft=2, salt="t"):
    return DraftRequest(session_id, as_ids(ids), prompt_len, max_draft, salt, Sampling(0.5, 7))


def pair(incarnation="one"):
    drafter = SpyDrafter()
    sync = SessionSync("me")
    sync.reset(incarnation)
    return sync, drafter, DraftTable(drafter, incarnation)


def exchange(sync, table, *requests):
    """One round: every call of it is handled, the last answer is absorbed."""
    calls = sync.prepare(requests)
    answers = [table.handle(call) for call in calls]
    return calls, sync.absorb(calls[-1], answers[-1])


def test_the_drafter_sees_the_whole_sequence_and_its_draft_comes_back():
    sync, drafter, table = pair()
    _, drafts = exchange(sync, table, request(ids=(1, 2, 3)))
    seen = drafter.requests[0]
    assert (seen.ids.tolist(), seen.prompt_len, seen.salt, seen.sampling) == (
        [1, 2, 3],
        2,
        "t",
        Sampling(0.5, 7),
    )
    assert (drafts[0].ids.tolist(), drafts[0].source) == ([4, 5], "model")


def test_a_second_round_carries_new_ids_only():
    sync, drafter, table = pair()
    exchange(sync, table, request(ids=(1, 2, 3)))
    calls, _ = exchange(sync, table, request(ids=(1, 2, 3, 9, 8)))
    (item,) = calls[0].items
    assert (item.base_len, item.new_ids, item.opening) == (3, as_ids([9, 8]).tobytes(), None)
    assert drafter.requests[1].ids.tolist() == [1, 2, 3, 9, 8]


def test_another_process_asks_for_the_prefix_once_and_gets_it():
    sync, _, table = pair()
    exchange(sync, table, request(ids=(1, 2, 3)))
    drafter = SpyDrafter()
    fresh = DraftTable(drafter, "one")  # same name, empty memory: as bad as it gets
    _, drafts = exchange(sync, fresh, request(ids=(1, 2, 3, 4)))
    assert len(drafts[0]) == 0
    assert drafter.requests == []
    _, drafts = exchange(sync, fresh, request(ids=(1, 2, 3, 4, 5)))
    assert drafts[0].ids.tolist() == [6, 7]
    assert drafter.requests[0].ids.tolist() == [1, 2, 3, 4, 5]


def test_a_call_for_another_incarnation_changes_nothing():
    sync, drafter, table = pair("one")
    sync.reset("two")
    _, drafts = exchange(sync, table, request())
    assert len(drafts[0]) == 0
    assert (drafter.requests, table.sessions) == ([], [])


def test_an_answer_to_an_older_call_is_not_taken_for_a_newer_one():
    sync, _, table = pair()
    first = sync.prepare([request(ids=(1, 2, 3))])[-1]
    late = table.handle(first)
    second = sync.prepare([request(ids=(1, 2, 3, 4))])[-1]
    assert len(sync.absorb(second, late)[0]) == 0
    assert sync.absorb(second, table.handle(second))[0].ids.tolist() == [5, 6]


def test_a_call_that_arrives_twice_changes_nothing():
    sync, drafter, table = pair()
    call = sync.prepare([request(ids=(1, 2, 3))])[-1]
    assert table.handle(call) == table.handle(call)
    assert drafter.seen == {"me/s": [1, 2, 3]}


def test_ids_that_would_leave_a_gap_are_refused():
    sync, drafter, table = pair()
    exchange(sync, table, request(ids=(1, 2, 3)))
    ahead = DraftItem("s", base_len=5, new_ids=as_ids([9]).tobytes(), max_draft=1)
    assert table.handle(DraftCall("me", "one", 7, items=(ahead,))).drafts == (None,)
    assert drafter.seen == {"me/s": [1, 2, 3]}


def test_an_outcome_of_another_call_than_the_last_one_is_not_taken_for_its_own():
    sync, drafter, table = pair()
    calls, _ = exchange(sync, table, request(ids=(1, 2, 3)))
    old = OutcomeItem("s", number=calls[-1].number - 1, num_drafted=1, num_accepted=1)
    table.handle(DraftCall("me", "one", 7, outcomes=(old,)))
    assert drafter.outcomes == []


def test_a_long_prefix_goes_ahead_in_pieces():
    sync, drafter, table = pair()
    ids = np.arange(3 * MAX_IDS_BYTES // 4 + 5, dtype=np.int32)
    calls, drafts = exchange(sync, table, request(ids=ids), request("b", ids=(5, 6)))
    assert [sum(len(i.new_ids) for i in call.items) <= MAX_IDS_BYTES for call in calls] == [True] * 5
    assert [d.ids.tolist() for d in drafts] == [[int(ids[-1]) + 1, int(ids[-1]) + 2], [7, 8]]
    assert drafter.seen == {"me/s": ids.tolist(), "me/b": [5, 6]}
    assert len(drafter.requests) == 2


def test_outcomes_travel_with_the_next_call():
    sync, drafter, table = pair()
    _, drafts = exchange(sync, table, request(ids=(1, 2, 3), max_draft=3))
    sync.observe([Outcome("s", drafts[0].clipped(2), 1), Outcome("unknown", drafts[0], 3)])
    assert drafter.outcomes == []
    exchange(sync, table, request(ids=(1, 2, 3, 4)))
    (outcome,) = drafter.outcomes
    assert (outcome.session_id, outcome.draft.ids.tolist(), outcome.num_accepted) == ("me/s", [4, 5], 1)


def test_an_outcome_of_a_draft_that_never_came_is_not_reported():
    sync, drafter, table = pair()
    exchange(sync, table, request(max_draft=2))
    call = sync.prepare([request(ids=(1, 2, 3, 4))])[-1]
    table.handle(call)  # its answer is lost, so the round goes on without a draft
    sync.observe([Outcome("s", EMPTY_DRAFT, 0)])
    exchange(sync, table, request(ids=(1, 2, 3, 4, 5)))
    assert drafter.outcomes == []


def test_the_last_ids_come_with_the_close_if_the_text_may_be_remembered():
    sync, drafter, table = pair()
    exchange(sync, table, request("a", ids=(1, 2, 3)), request("b", ids=(1, 2)), request("c", ids=(1,)))
    sync.close("a", as_ids([1, 2, 3, 4, 5]))
    sync.close("b", None)
    sync.close("never drafted", as_ids([1]))
    table.handle(sync.flush())
    assert drafter.closed == [("me/a", [1, 2, 3, 4, 5]), ("me/b", None)]
    assert table.sessions == [("me", "c")]


def test_a_session_closed_while_its_draft_is_under_way_stays_closed():
    sync, _, table = pair()
    call = sync.prepare([request()])[-1]
    answer = table.handle(call)
    sync.close("s", None)
    assert len(sync.absorb(call, answer)[0]) == 0
    table.handle(sync.flush())
    assert (sync.num_sessions, table.sessions) == (0, [])


def test_a_lease_that_ends_takes_the_owners_sessions_with_it_and_no_others():
    drafter = SpyDrafter()
    table = DraftTable(drafter, "one")
    for owner in ("me", "you"):
        sync = SessionSync(owner)
        sync.reset("one")
        exchange(sync, table, request())
    assert table.release("me") == 1
    assert (table.sessions, drafter.closed) == ([("you", "s")], [("me/s", None)])


EVENTS = st.sampled_from(["answered", "answer lost", "process replaced", "table emptied"])
ROUNDS = st.lists(st.tuples(EVENTS, st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=30)


@given(ROUNDS)
def test_whatever_happens_a_draft_is_made_from_the_true_ids(rounds):
    sync, drafter, table = pair()
    texts = {f"s{i}": [i + 1] for i in range(4)}
    for turn, (event, which, grown) in enumerate(rounds):
        if event == "process replaced":
            drafter = SpyDrafter()
            table = DraftTable(drafter, f"life {turn}")
            sync.reset(f"life {turn}")
        elif event == "table emptied":
            table.release("me")
        texts[f"s{which}"] += [int(x) for x in np.random.default_rng(turn).integers(0, 99, grown)]
        asked = [request(name, ids=ids) for name, ids in texts.items()]
        calls = sync.prepare(asked)
        answers = [table.handle(call) for call in calls]
        lost = DraftAnswer("", 0, ()) if event == "answer lost" else answers[-1]
        drafts = sync.absorb(calls[-1], lost)
        for name, draft in zip(texts, drafts, strict=True):
            assert len(draft) == 0 or draft.ids.tolist() == [texts[name][-1] + 1, texts[name][-1] + 2]
        for name, ids in drafter.seen.items():
            assert ids == texts[name.removeprefix("me/")][: len(ids)]
    exchange(sync, table, *asked)
    _, drafts = exchange(sync, table, *asked)  # two quiet rounds later everything is whole again
    assert [d.ids[0] for d in drafts] == [ids[-1] + 1 for ids in texts.values()]
    assert {name.removeprefix("me/"): ids for name, ids in drafter.seen.items()} == texts
