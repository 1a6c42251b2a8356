"""Chunks joined on their way: nothing is lost."""

from serving.deploy.joining import joined
from serving.requests import Chunk, Receipt
from serving.types import ExceptionRecord, Ledger, TokenLogprob


def chunks(count: int) -> list[Chunk]:
    return [
        Chunk(
            "r", (i, i + 100), f"{i} ", Receipt(rounds=i + 1), Ledger(float(i), i),
            "length" if i == count - 1 else None, (TokenLogprob(i, -0.1), TokenLogprob(i + 100, -0.2)),
            ("exception", "bonus"), (ExceptionRecord(2 * i, i, 7, 0.5),), ((i, 7),),
        )
        for i in range(count)
    ]  # fmt: skip


def test_what_is_joined_is_what_was_there() -> None:
    whole = joined(chunks(3))
    assert (whole.ids, whole.text) == ((0, 100, 1, 101, 2, 102), "0 1 2 ")
    assert (whole.receipt.rounds, whole.ledger, whole.finish_reason) == (3, Ledger(2.0, 2), "length")
    assert whole.logprobs is not None
    assert [entry.token_id for entry in whole.logprobs] == list(whole.ids)
    assert whole.tiers == ("exception", "bonus") * 3
    assert ([one.index for one in whole.exceptions], whole.seen) == ([0, 2, 4], ((0, 7), (1, 7), (2, 7)))
    assert joined([Chunk("r", (1,), "a", Receipt()), Chunk("r", (2,), "b", Receipt())]).logprobs is None
