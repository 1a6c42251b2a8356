"""What is emitted of a verdict: stops before lengths, and nothing after either."""

import pytest

from serving.requests import Limits
from serving.rules.clip import clip
from serving.types import Verdict, as_ids

STOP = 99


def never(token: int, *, may_end: bool) -> bool:
    return False


def at_stop(token: int, *, may_end: bool) -> bool:
    return may_end and token == STOP


def verdict(num_accepted: int, next_id: int | None = 7) -> Verdict:
    return Verdict(num_accepted, next_id, tiers=())


@pytest.mark.parametrize(
    ("draft", "num_accepted", "room", "ids", "accepted", "reason"),
    [
        ([1, 2, 3], 3, 10, [1, 2, 3, 7], 3, None),
        ([1, 2, 3], 1, 10, [1, 7], 1, None),
        ([1, 2, 3], 0, 10, [7], 0, None),
        ([], 0, 10, [7], 0, None),
        ([1, 2, 3], 3, 2, [1, 2], 2, "length"),
        ([1, 2, 3], 3, 4, [1, 2, 3, 7], 3, "length"),
        ([1, STOP, 3], 3, 10, [1, STOP], 2, "stop"),
        ([1, STOP, 3], 3, 2, [1, STOP], 2, "stop"),
        ([1, 2, STOP], 3, 10, [1, 2, STOP], 3, "stop"),
        ([1, STOP, 3], 1, 10, [1, 7], 1, None),
    ],
)
def test_table(
    draft: list[int], num_accepted: int, room: int, ids: list[int], accepted: int, reason: str | None
) -> None:
    limits = Limits(100, frozenset({STOP}))
    clipped = clip(verdict(num_accepted), as_ids(draft), limits=limits, room=room, ends_text=never)
    assert clipped.ids.tolist() == ids
    assert clipped.num_accepted == accepted
    assert clipped.finish_reason == reason


@pytest.mark.parametrize(
    ("block", "ids", "reason"),
    [
        ([10, 11, STOP, 20, 21, 22], [10, 11, STOP], "stop"),
        ([10, 11, 12, 20, 21, 22, STOP], [10, 11, 12, 20, 21], "length"),
    ],
)
def test_case_02_a_stop_within_the_length_wins(block: list[int], ids: list[int], reason: str) -> None:
    clipped = clip(verdict(len(block)), as_ids(block), limits=Limits(5), room=5, ends_text=at_stop)
    assert clipped.ids.tolist() == ids
    assert clipped.finish_reason == reason


def test_text_sees_each_emitted_token_once_and_no_other() -> None:
    seen: list[int] = []

    def watch(token: int, *, may_end: bool) -> bool:
        seen.append(token)
        return False

    clip(verdict(4), as_ids([1, 2, STOP, 4]), limits=Limits(9, frozenset({STOP})), room=9, ends_text=watch)
    assert seen == [1, 2, STOP]


@pytest.mark.parametrize("min_tokens", range(6))
def test_no_stop_ends_a_request_before_min_tokens(min_tokens: int) -> None:
    block = [STOP, 1, STOP, 2, STOP]
    for limits, ends_text in (
        (Limits(9, frozenset({STOP}), min_tokens=min_tokens), never),
        (Limits(9, min_tokens=min_tokens), at_stop),
    ):
        clipped = clip(verdict(5), as_ids(block), limits=limits, room=9, ends_text=ends_text)
        assert len(clipped.ids) == {0: 1, 1: 1, 2: 3, 3: 3, 4: 5, 5: 5}[min_tokens]
    late = Limits(9, frozenset({STOP}), min_tokens=6)
    clipped = clip(verdict(2), as_ids([1, STOP]), limits=late, room=5, ends_text=never)
    assert clipped.ids.tolist() == [1, STOP]  # four tokens were out before
