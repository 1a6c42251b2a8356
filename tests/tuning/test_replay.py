"""Replay: labels are exact and bounded, and no feature knows the future."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.drafters.token_kinds import token_kinds
from serving.memory.suffix import SuffixCache
from serving.types import as_ids, common_prefix
from tuning.replay import (
    Costs,
    Played,
    Replayed,
    cache_only,
    hvd,
    model_only,
    oracle,
    play,
    replay,
    rule,
)
from tuning.selfgen import Dialogue

KINDS = token_kinds("ab (,\n")
texts = st.lists(st.integers(0, 4), min_size=1, max_size=40)
dialogues = st.lists(st.builds(lambda p, o: Dialogue(as_ids(p), as_ids(o)), texts, texts), min_size=1, max_size=6)


def replayed(found: list[Dialogue], requests_a_cache: int = 3, *, model_yield: int = 1) -> list[Replayed]:
    yields = [np.full(len(one.output_ids), model_yield, dtype=np.int32) for one in found]
    return list(replay(found, yields, lambda: SuffixCache(max_draft=8), KINDS, requests_a_cache=requests_a_cache))


@settings(max_examples=60, deadline=None)
@given(dialogues)
def test_yields_are_within_their_drafts(found: list[Dialogue]) -> None:
    for one, dialogue in zip(replayed(found), found, strict=True):
        assert len(one) == len(dialogue.output_ids)
        assert (one.yields >= 0).all()
        assert (one.yields <= one.lengths).all()
        assert (one.yields <= np.arange(len(one), 0, -1)).all()
        assert not one.features[one.lengths == 0].any()


def test_rounds_of_the_model_are_history_with_what_it_yields() -> None:
    text = [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2]
    one = [Dialogue(as_ids([9]), as_ids(text))]
    (few,), (many,) = replayed(one, model_yield=0), replayed(one, model_yield=3)
    assert few.lengths.tolist() == many.lengths.tolist()
    assert not np.array_equal(few.features, many.features)


@settings(max_examples=60, deadline=None)
@given(dialogues, st.data())
def test_mutating_the_future_changes_no_feature(found: list[Dialogue], data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(found) - 1))
    output = found[number].output_ids
    t = data.draw(st.integers(0, len(output) - 1))
    changed = output.copy()
    changed[t:] = data.draw(st.lists(st.integers(0, 4), min_size=len(output) - t, max_size=len(output) - t))
    mutated = [*found[:number], Dialogue(found[number].prompt_ids, changed), *reversed(found[number + 1 :])]
    before, after = replayed(found), replayed(mutated)
    for one, other in zip(before[:number], after[:number], strict=True):
        np.testing.assert_array_equal(one.features, other.features)
    np.testing.assert_array_equal(before[number].features[: t + 1], after[number].features[: t + 1])
    np.testing.assert_array_equal(before[number].lengths[: t + 1], after[number].lengths[: t + 1])


def test_labels_by_hand() -> None:
    found = Dialogue(as_ids([1, 2, 3, 4, 9]), as_ids([1, 2, 3, 4, 1, 2, 0]))
    (one,) = replayed([found])
    # After 9 nothing; after 1: 2; after 1 2: 3 4; after 1 2 3: 4 9 1, of which 4 is right; after 4: 9 1 2 3, wrong; ...
    assert one.lengths.tolist() == [0, 1, 2, 3, 4, 1, 2]
    assert one.yields.tolist() == [0, 1, 2, 1, 0, 1, 0]


def test_an_earlier_answer_is_known_to_the_same_cache_only() -> None:
    first, second = Dialogue(as_ids([7]), as_ids([1, 2, 3, 4])), Dialogue(as_ids([8]), as_ids([1, 2, 3, 4]))
    assert replayed([first, second], requests_a_cache=2)[1].yields.tolist() == [0, 1, 2, 1]
    assert replayed([first, second], requests_a_cache=1)[1].yields.tolist() == [0, 0, 0, 0]


def test_common_prefix() -> None:
    assert common_prefix(as_ids([1, 2, 3]), as_ids([1, 2, 4, 5])) == 2
    assert common_prefix(as_ids([1, 2, 3]), as_ids([1, 2])) == 2
    assert common_prefix(as_ids([]), as_ids([1])) == 0


def played(yields: list[int], lengths: list[int], model: list[int]) -> Played:
    size = len(yields)
    scores = np.array(lengths, dtype=np.float32)
    one = Replayed(np.zeros((size, 1), dtype=np.float32), np.array(yields), np.array(lengths), scores)
    return Played(one, predicted=np.array(yields, dtype=np.float32), model_yields=np.array(model))


def test_every_arm_by_hand() -> None:
    one = [played([0, 4, 3, 2, 1, 0, 0, 0], [0, 4, 4, 4, 4, 4, 4, 0], [1, 1, 1, 1, 1, 1, 1, 0])]
    costs = Costs(row=0.1, model=0.5, model_draft=2)
    assert play(one, model_only, costs, has_model=False).rounds == 8
    cached = play(one, cache_only, costs, has_model=False)
    assert (cached.rounds, cached.accepted, cached.cache_drafts) == (4, 4, 2)
    assert cached.cost == 4 + 2 * 4 * 0.1
    models = play(one, model_only, costs)
    assert (models.rounds, models.accepted, models.cost) == (4, 4, 4 * 1.7)
    assert (play(one, oracle, costs).rounds, play(one, oracle, costs).accepted) == (3, 5)
    assert play(one, hvd(float("inf")), costs) == models
    assert play(one, hvd(float("-inf")), costs) == play(one, cache_only, costs)
    assert play(one, rule(5.0), costs) == models


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**32))
def test_accepted_and_rounds_add_up_to_the_tokens(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, size)
    one = [
        played(
            np.minimum(rng.integers(0, 6, size), lengths).tolist(), lengths.tolist(), rng.integers(0, 4, size).tolist()
        )
    ]
    for arm in (cache_only, model_only, oracle, hvd(2.0), rule(3.0)):
        found = play(one, arm, Costs())
        assert found.rounds + found.accepted == found.tokens == size
