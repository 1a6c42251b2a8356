"""The decode loop without torch: losslessness, ends of texts, counts, cancellation, fairness."""

from dataclasses import replace

import pytest

from serving.decode.grouping import Grouping
from serving.decode.offline import complete
from serving.drafters.ready import PlainDrafter
from serving.requests import Chunk, GenerationRequest, Limits, Receipt
from serving.types import as_ids
from tests.decode.scripted import (
    ScriptedDrafter,
    ScriptedModel,
    arithmetic,
    make_scheduler,
    oracle,
    plain,
    request,
    spell,
)

DRAFTERS = {
    "none": lambda: PlainDrafter(),
    "right": lambda: oracle(arithmetic),
    "half right": lambda: oracle(arithmetic, right=2),
    "wrong": lambda: oracle(arithmetic, right=0),
    "empty": lambda: ScriptedDrafter(lambda _: []),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("max_draft", [1, 2, 4, 8])
@pytest.mark.parametrize("feed_passes", [0, 3])
def test_case_09_any_drafter_equals_plain_decoding(drafter: str, max_draft: int, feed_passes: int) -> None:
    scheduler = make_scheduler(ScriptedModel(arithmetic, feed_passes), DRAFTERS[drafter](), max_draft=max_draft)
    requests = [request(f"r{i}", prompt=(i + 3, 4, i), max_tokens=15 + i) for i in range(7)]
    for done in complete(scheduler, requests):
        index = int(done.request_id[1:])
        assert done.output_ids == plain(arithmetic, (index + 3, 4, index), 15 + index)
        assert done.finish_reason == "length"
        assert done.text == spell(done.output_ids)


@pytest.mark.parametrize("stop_at", range(1, 9))
def test_case_01_a_stop_inside_a_block_ends_text_stream_and_usage(stop_at: int) -> None:
    expected = plain(arithmetic, (5, 9), 20)
    stop = expected[stop_at - 1]
    ends = expected.index(stop) + 1
    drafter = oracle(arithmetic)
    scheduler = make_scheduler(ScriptedModel(arithmetic), drafter, max_draft=8)
    chunks: list[Chunk] = []
    (done,) = complete(scheduler, [request("a", stop_ids=frozenset({stop}))], on_chunk=chunks.append)
    assert done.output_ids == expected[:ends]
    assert done.finish_reason == "stop"
    assert done.receipt.emitted == ends
    assert [token for chunk in chunks for token in chunk.ids] == done.output_ids
    # nothing behind the stop reaches what drafters remember
    remembered = drafter.closed["a"]
    assert remembered is not None
    assert remembered.tolist() == [5, 9, *expected[:ends]]


def test_case_05_a_refused_stop_proposal_does_not_end_the_request() -> None:
    stop = 2
    drafter = ScriptedDrafter(lambda r: [stop] * r.max_draft)
    scheduler = make_scheduler(ScriptedModel(arithmetic), drafter)
    (done,) = complete(scheduler, [request("a", stop_ids=frozenset({stop}))])
    assert done.output_ids == plain(arithmetic, (5, 9), 20)
    assert done.finish_reason == "length"


@pytest.mark.parametrize("max_tokens", range(1, 21))
def test_case_07_usage_is_exactly_what_was_asked_and_delivered(max_tokens: int) -> None:
    scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic), max_draft=5)
    chunks: list[Chunk] = []
    (done,) = complete(scheduler, [request("a", max_tokens=max_tokens)], on_chunk=chunks.append)
    assert len(done.output_ids) == max_tokens
    assert done.receipt.emitted == max_tokens == sum(len(chunk.ids) for chunk in chunks)
    assert done.finish_reason == "length"


def test_case_04_a_stop_string_over_two_blocks_never_shows_its_beginning() -> None:
    expected = plain(arithmetic, (5, 9), 20)
    text = spell(expected)
    # blocks of two tokens: accepted one, then the target's; the stop string spans tokens 4..7
    scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic, right=1), max_draft=1)
    chunks: list[Chunk] = []
    (done,) = complete(scheduler, [request("a", stop_strings=(text[3:7],))], on_chunk=chunks.append)
    assert done.text == text[:3]
    assert done.output_ids == expected[:7]
    assert done.finish_reason == "stop"
    streamed = ""
    for chunk in chunks:
        streamed += chunk.text
        assert text[:3].startswith(streamed)


def test_case_20_rates_stay_within_bounds_and_exclude_the_bonus() -> None:
    for right in (0, 1, 3, 99):
        scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic, right=right), max_draft=3)
        dones = list(complete(scheduler, [request(f"r{i}", max_tokens=21) for i in range(3)]))
        stats = scheduler.stats
        assert 0.0 <= stats.acceptance_rate <= 1.0
        assert stats.accepted == sum(done.receipt.accepted for done in dones)
        assert stats.emitted == 63
        for done in dones:
            receipt = done.receipt
            assert receipt.accepted <= receipt.drafted
            # each pass adds exactly one token of the target's own, except where the limit cut a block
            assert receipt.emitted - receipt.accepted <= receipt.target_passes
        if right == 0:
            assert stats.accepted == 0
        if right == 99:
            assert stats.acceptance_rate == 1.0


def test_case_25_drafts_of_every_length_in_one_batch() -> None:
    lengths = {"r0": 0, "r1": 2, "r2": 5}
    full = oracle(arithmetic)
    drafter = ScriptedDrafter(lambda r: full.guess(r)[: lengths[r.session_id]])
    scheduler = make_scheduler(ScriptedModel(arithmetic), drafter, max_draft=5)
    for done in complete(scheduler, [request(name) for name in lengths]):
        assert done.output_ids == plain(arithmetic, (5, 9), 20)


def test_case_26_without_drafts_the_cost_is_that_of_plain_decoding() -> None:
    model, reference = ScriptedModel(arithmetic), ScriptedModel(arithmetic)
    scheduler = make_scheduler(model, ScriptedDrafter(lambda _: []))
    (done,) = complete(scheduler, [request("a")])
    (_,) = complete(make_scheduler(reference, PlainDrafter()), [request("a")])
    assert model.rows == reference.rows == [1] * 20
    assert done.receipt.drafts_empty == 20
    assert scheduler.stats.drafts_empty == 20


@pytest.mark.parametrize("after_steps", [0, 1, 3])
def test_a_cancelled_request_is_gone_from_every_role_at_once(after_steps: int) -> None:
    model, drafter = ScriptedModel(arithmetic), oracle(arithmetic)
    scheduler = make_scheduler(model, drafter, max_sessions=2)
    chunks: list[Chunk] = []
    for name in ("a", "b", "c"):
        scheduler.submit(request(name, max_tokens=50), chunks.append)
    for _ in range(after_steps):
        scheduler.step()
    for name in ("a", "c", "unknown"):
        scheduler.cancel(name)
    assert "a" not in model.open_sessions
    assert [chunk.request_id for chunk in chunks if chunk.finish_reason == "cancelled"] == ["a", "c"]
    while scheduler.has_work:
        scheduler.step()
    assert model.open_sessions == {}
    assert drafter.closed["b"] is not None
    assert drafter.closed.get("a") is None


def test_tenants_take_turns() -> None:
    scheduler = make_scheduler(ScriptedModel(arithmetic), PlainDrafter(), max_sessions=1)
    order: list[str] = []
    for salt, name in [("greedy", f"g{i}") for i in range(5)] + [("modest", "m0")]:
        one = GenerationRequest(name, as_ids([4]), Limits(1), salt=salt)
        scheduler.submit(one, lambda chunk: order.append(chunk.request_id))
    while scheduler.has_work:
        scheduler.step()
    assert order.index("m0") == 1


def test_two_groups_take_turns_when_measured_to_pay_and_change_nothing() -> None:
    class AlwaysTwo(Grouping):
        def num_groups(self, batch_size: int) -> int:
            return 2 if batch_size > 1 else 1

    model = ScriptedModel(arithmetic)
    scheduler = make_scheduler(model, oracle(arithmetic, right=2), grouping=AlwaysTwo(shares_cores=False))
    requests = [request(f"r{i}", prompt=(i + 3, 1), max_tokens=30) for i in range(4)]
    for done in complete(scheduler, requests):
        assert done.output_ids == plain(arithmetic, (int(done.request_id[1:]) + 3, 1), 30)
    halves = [rows for rows in model.rows if rows == 12]  # two sessions of six rows
    assert halves


@pytest.mark.parametrize(
    ("draft_s", "verify_s", "half_s", "shares_cores", "expected"),
    [(0.02, 0.02, 0.012, False, 2), (0.02, 0.02, 0.02, False, 1), (0.02, 0.02, 0.012, True, 1)],
)
def test_grouping_follows_the_measurements(
    draft_s: float, verify_s: float, half_s: float, shares_cores: bool, expected: int
) -> None:
    grouping = Grouping(shares_cores=shares_cores)
    assert grouping.num_groups(8) == 1
    grouping.record(8, draft_s=draft_s, verify_s=verify_s)
    grouping.record(4, draft_s=half_s, verify_s=half_s)
    assert grouping.num_groups(8) == expected


def test_a_resumed_request_goes_on_where_it_was() -> None:
    expected = plain(arithmetic, (5, 9), 20)
    scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic))
    first = request("a")
    resumed = GenerationRequest(
        "a", first.prompt_ids, first.limits, resume_ids=as_ids(expected[:8]), receipt=Receipt(resumed=1)
    )
    (done,) = complete(scheduler, [resumed])
    assert done.output_ids == expected[8:]
    assert done.text == spell(expected[8:])


def test_a_prompt_counts_where_its_request_first_was() -> None:
    scheduler = make_scheduler(ScriptedModel(arithmetic), PlainDrafter())
    resumed = replace(request("a", prompt=(5, 9)), receipt=Receipt(resumed=1))
    list(complete(scheduler, [resumed, request("b", prompt=(1, 2, 3))]))
    assert scheduler.stats.prompt_tokens == 3


@pytest.mark.parametrize(("continues", "text"), [(True, " on it goes"), (False, "on it goes")])
def test_a_raw_completion_keeps_the_space_before_its_first_word(continues: bool, text: str) -> None:
    """Decoders of the sentencepiece family take the first space off what they are given."""
    words = ["", "", "", "on", "it", "goes"]
    scheduler = make_scheduler(
        ScriptedModel(lambda ids: len(ids)),
        PlainDrafter(),
        decode=lambda ids: "".join(f" {words[i]}" if words[i] else "" for i in ids).removeprefix(" "),
    )
    asked = replace(request("a", prompt=(3, 4, 5), max_tokens=3), continues_prompt=continues)
    (done,) = complete(scheduler, [asked])
    assert done.text == text
