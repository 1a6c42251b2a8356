"""Whatever crosses a process boundary is small and free of tensors and arrays of scores."""

import pickle
import pickletools
from fractions import Fraction

import numpy as np
import pytest

from serving.deploy.messages import MAX_MESSAGE_BYTES, DraftCall, DraftedItem
from serving.deploy.sync import SessionSync
from serving.deploy.table import DraftTable
from serving.errors import OverloadedError, RequestError
from serving.protocols import DraftRequest, Outcome
from serving.requests import Chunk, GenerationRequest, Limits, Receipt, Sampling
from serving.types import Draft, as_ids
from tests.deploy.fakes import SpyDrafter


def modules_in(message):
    """Top-level modules that unpickling `message` would import."""
    strings = [str(arg) for _, arg, _ in pickletools.genops(pickle.dumps(message)) if isinstance(arg, str)]
    return {text.split(".")[0] for text in strings}


def a_round(batch, *, prompt_len, history):
    """The calls and the last answer of one round in which every session has something new to tell."""
    sync, drafter = SessionSync("a" * 8), SpyDrafter()
    sync.reset("0123456789ab")
    table = DraftTable(drafter, "0123456789ab")
    ids = np.arange(prompt_len + history, dtype=np.int32)
    names = [f"chatcmpl-{i:032x}" for i in range(batch)]
    drafts, calls = [], []
    for length in (prompt_len, prompt_len + history):
        requests = [DraftRequest(n, ids[:length], prompt_len, 16, "f" * 64, Sampling()) for n in names]
        if drafts:
            sync.observe([Outcome(n, d, 3) for n, d in zip(names, drafts, strict=True)])
        calls = sync.prepare(requests)
        answers = [table.handle(call) for call in calls]
        drafts = sync.absorb(calls[-1], answers[-1])
        assert all(len(d) == 16 for d in drafts)
    return [*calls, answers[-1]]


ids = as_ids(range(2048))
MESSAGES = {
    "request": GenerationRequest("r" * 40, ids, Limits(1024, frozenset({1, 2}), ("stop",)), salt="f" * 64),
    "resumed request": GenerationRequest("r", ids, Limits(4096), resume_ids=ids, receipt=Receipt()),
    "chunk": Chunk("r" * 40, tuple(range(65)), "x" * 400, Receipt()),
    "drafted": DraftedItem.of(Draft(as_ids(range(64)), "model", np.ones(64, np.float32))),
    "call": DraftCall("o", "i", 1),
}
ROUNDS = [(1, 10, 5), (16, 2048, 17), (64, 500, 17), (128, 100, 17), (4, 50_000, 17)]


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_a_record_that_crosses_is_small_and_has_no_tensor(message):
    assert len(pickle.dumps(message)) < MAX_MESSAGE_BYTES
    assert not {"torch", "transformers"} & modules_in(message)


@pytest.mark.parametrize(("batch", "prompt_len", "history"), ROUNDS)
def test_a_round_of_drafting_is_small_and_has_neither_tensor_nor_array(batch, prompt_len, history):
    for message in a_round(batch, prompt_len=prompt_len, history=history):
        assert len(pickle.dumps(message)) < MAX_MESSAGE_BYTES
        assert not {"torch", "transformers", "numpy"} & modules_in(message)


@pytest.mark.parametrize("draft", [Draft(as_ids([1, 2]), "model", num_passes=3), Draft(num_passes=1), Draft()])
def test_a_draft_arrives_with_the_passes_it_took(draft):
    arrived = DraftedItem.of(draft).draft()
    assert (arrived.ids.tolist(), arrived.source, arrived.num_passes) == (
        draft.ids.tolist(),
        draft.source,
        draft.num_passes,
    )


def test_the_check_sees_what_is_inside():
    assert "fractions" in modules_in(Chunk("r", (Fraction(1, 3),), "", Receipt()))


@pytest.mark.parametrize("error", [RequestError("max_tokens", "must be at least 1"), OverloadedError("full")])
def test_an_error_that_crosses_arrives_as_itself(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.args) == (type(error), str(error), error.args)
