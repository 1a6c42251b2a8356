"""The model drafter: one token a pass for the whole batch, within its own context."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from serving.decode.offline import complete
from serving.drafters.model import ModelDrafter
from serving.protocols import DraftRequest, ScoreRequest
from serving.requests import Sampling
from serving.types import Draft, DraftLimits, DraftStops, ScoreTable, as_ids
from tests.decode.scripted import ScriptedModel, arithmetic, make_scheduler, plain, request


def draft_request(name: str, ids: list[int], max_draft: int) -> DraftRequest:
    return DraftRequest(name, as_ids(ids), 2, max_draft)


def test_a_batch_of_different_wishes_takes_as_many_passes_as_the_longest() -> None:
    model = ScriptedModel(arithmetic)
    drafter = ModelDrafter(model, max_length=100)
    drafts = drafter.start([draft_request("a", [5, 9], 4), draft_request("b", [3, 3], 2)]).result()
    assert drafts[0].ids.tolist() == plain(arithmetic, [5, 9], 4)
    assert drafts[1].ids.tolist() == plain(arithmetic, [3, 3], 2)
    assert model.num_passes == 4
    assert model.rows == [2, 2, 1, 1]
    assert [draft.num_passes for draft in drafts] == [4, 2]


def test_a_prompt_that_is_still_being_fed_gets_no_draft_and_holds_nobody_up() -> None:
    model = ScriptedModel(arithmetic, feed_passes=1)
    drafter = ModelDrafter(model, max_length=100)
    (first,) = drafter.start([draft_request("a", [5, 9], 3)]).result()
    assert len(first) == 0
    (second,) = drafter.start([draft_request("a", [5, 9], 3)]).result()
    assert second.ids.tolist() == plain(arithmetic, [5, 9], 3)
    assert (first.num_passes, second.num_passes) == (0, 3)  # as of a target, a pass that only reads does not count


def test_case_24_where_the_draft_context_ends_the_request_goes_on() -> None:
    target, draft = ScriptedModel(arithmetic), ScriptedModel(arithmetic)
    drafter = ModelDrafter(draft, max_length=64)
    scheduler = make_scheduler(target, drafter, max_draft=4, max_length=128)
    prompt = tuple(range(3, 63))
    (done,) = complete(scheduler, [request("a", prompt=prompt, max_tokens=50)])
    assert done.output_ids == plain(arithmetic, prompt, 50)
    assert 0 < done.receipt.drafted < 10
    assert done.receipt.draft_passes == done.receipt.drafted == draft.num_passes
    assert drafter.num_sessions == 0
    assert draft.open_sessions == {}


def test_a_model_that_drafts_by_itself_is_asked_once_for_all_greedy_drafts() -> None:
    model, calls = ScriptedModel(arithmetic), list[tuple[list[str], DraftStops]]()

    def draft_all(requests: Sequence[ScoreRequest], stops: DraftStops) -> list[Draft | None]:
        calls.append(([one.session_id for one in requests], stops))
        counts = [None if one.session_id == "fed" else most for one, most in zip(requests, stops.most, strict=True)]
        return [
            None
            if most is None
            else Draft(as_ids(plain(arithmetic, one.ids.tolist(), most)), "eagle3", num_passes=most)
            for one, most in zip(requests, counts, strict=True)
        ]

    drafter = ModelDrafter(model, max_length=100, min_confidence=0.25, draft_all=draft_all)
    limits = DraftLimits(4, 4, model_floor=0.5)
    wishes = [replace(draft_request("a", [5, 9], 4), max_by_source=limits), draft_request("b", [3, 3], 2)]
    sampled = replace(draft_request("s", [5, 9], 3), sampling=Sampling(temperature=0.7))
    drafts = drafter.start([*wishes, draft_request("fed", [1, 2], 4), sampled]).result()
    for wish, draft in zip(wishes, drafts[:2], strict=True):
        assert draft.ids.tolist() == plain(arithmetic, wish.ids.tolist(), wish.max_draft)
    assert [draft.num_passes for draft in drafts] == [4, 2, 0, 3]
    ((names, stops),) = calls
    assert names == ["a", "b", "fed"]
    assert (stops.most.tolist(), stops.floors.tolist(), stops.least) == ([4, 2, 4], [0.5, 0.0, 0.0], 0.25)
    assert model.rows == [1, 1, 1]  # of the sampled one, token by token
    refused = ModelDrafter(model, max_length=100, draft_all=lambda requests, stops: None)
    (draft,) = refused.start([draft_request("d", [5, 9], 3)]).result()
    assert draft.ids.tolist() == plain(arithmetic, [5, 9], 3)


class Fading(ScriptedModel):
    """Every token is half as likely as the one before; the first behind two is certain."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreTable | None]:
        tables = super().score(requests)
        for table, asked in zip(tables, requests, strict=True):
            assert table is not None
            depth = len(asked.ids) - 2
            object.__setattr__(table, "logsumexp", 1.0 + np.full(1, depth * np.log(2), dtype=np.float32))
        return tables


@pytest.mark.parametrize(
    ("floor", "drafted", "passes"),
    [(0.0, 6, 6), (1 / 8, 3, 3), (0.05, 3, 4), (0.2, 2, 3), (0.4, 2, 2), (0.6, 1, 1), (1.0, 1, 1), (1.1, 0, 1)],
)
def test_a_draft_ends_where_it_is_no_longer_likely_enough_as_a_whole(floor: float, drafted: int, passes: int) -> None:
    drafter = ModelDrafter(Fading(arithmetic), max_length=100)
    asked = replace(draft_request("a", [5, 9], 6), max_by_source=DraftLimits(6, 6, model_floor=floor))
    (draft,) = drafter.start([asked]).result()  # likely by 1, 1/2, 1/8, 1/64
    assert len(draft) == drafted
    assert draft.num_passes == passes


def test_low_confidence_ends_a_draft_before_the_doubtful_token() -> None:
    drafter = ModelDrafter(Fading(arithmetic), max_length=100, min_confidence=0.2)
    (draft,) = drafter.start([draft_request("a", [5, 9], 8)]).result()
    assert draft.confidences is not None
    assert draft.confidences.tolist() == pytest.approx([1.0, 0.5, 0.25])
    assert draft.num_passes == 4  # the one that found the doubtful token too
    (nothing,) = drafter.start([draft_request("a", [5, 9, 12, 88, 70], 8)]).result()
    assert (len(nothing), nothing.num_passes) == (0, 1)
