"""The model drafter: one token a pass for the whole batch, within its own context."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from serving.decode.offline import complete
from serving.drafters.model import ModelDrafter
from serving.protocols import DraftRequest, ScoreRequest
from serving.requests import Sampling
from serving.types import Ids, ScoreTable, as_ids
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


def test_a_model_that_goes_on_by_itself_is_asked_once_for_the_first_token_and_once_for_the_rest() -> None:
    model, calls = ScriptedModel(arithmetic), list[tuple[list[str], int]]()

    def chain(requests: Sequence[ScoreRequest], count: int) -> list[Ids] | None:
        calls.append(([one.session_id for one in requests], count))
        return [as_ids(plain(arithmetic, one.ids.tolist(), count)) for one in requests]

    drafter = ModelDrafter(model, max_length=100, chain=chain)
    wishes = [draft_request("a", [5, 9], 4), draft_request("b", [3, 3], 2), draft_request("c", [7, 7], 1)]
    drafts = drafter.start(wishes).result()
    for wish, draft in zip(wishes, drafts, strict=True):
        assert draft.ids.tolist() == plain(arithmetic, wish.ids.tolist(), wish.max_draft)
    assert calls == [(["a", "b"], 1), (["a"], 2)]
    assert (model.num_passes, [draft.num_passes for draft in drafts]) == (1, [4, 2, 1])
    sampled = replace(draft_request("d", [5, 9], 3), sampling=Sampling(temperature=0.7))
    for refused in (ModelDrafter(model, max_length=100, chain=lambda requests, count: None),
                    ModelDrafter(model, max_length=100, min_confidence=0.1, chain=chain)):  # fmt: skip
        (draft,) = refused.start([draft_request("d", [5, 9], 3)]).result()
        assert draft.ids.tolist() == plain(arithmetic, [5, 9], 3)
    drafter.start([sampled, draft_request("a", [5, 9], 3)])
    assert len(calls) == 2


def test_low_confidence_ends_a_draft_before_the_doubtful_token() -> None:
    class Fading(ScriptedModel):
        """Every token is half as likely as the one before."""

        def score(self, requests: list[ScoreRequest]) -> list[ScoreTable | None]:  # type: ignore[override]
            tables = super().score(requests)
            for table, asked in zip(tables, requests, strict=True):
                assert table is not None
                depth = len(asked.ids) - 2
                object.__setattr__(table, "logsumexp", 1.0 + np.full(1, depth * np.log(2), dtype=np.float32))
            return tables

    drafter = ModelDrafter(Fading(arithmetic), max_length=100, min_confidence=0.2)
    (draft,) = drafter.start([draft_request("a", [5, 9], 8)]).result()
    assert draft.confidences is not None
    assert draft.confidences.tolist() == pytest.approx([1.0, 0.5, 0.25])
    assert draft.num_passes == 4  # the one that found the doubtful token too
    (nothing,) = drafter.start([draft_request("a", [5, 9, 12, 88, 70], 8)]).result()
    assert (len(nothing), nothing.num_passes) == (0, 1)
