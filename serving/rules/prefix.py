"""The only acceptance code: every rule computes a mask, and this turns it into a verdict."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from serving.types import ExceptionRecord, ScoreTable, Tier, Verdict


def accept_prefix(scores: ScoreTable, keep: npt.NDArray[np.bool_], *, counts: Sequence[int] | None = None) -> Verdict:
    """Accept draft tokens up to the first one not in `keep` (bool[K]), then emit the target's own token.

    The token after a rejection is *recovered*, the one after a fully accepted block is the *bonus*; both are
    `next_ids` of the row that follows the accepted prefix. `next_ids` may be a sample, so this is greedy
    and sampled decoding in one. A mismatch in the prefix is recorded as an exception, with `counts` (K) where given.
    """
    if not len(keep):
        return Verdict(0, int(scores.next_ids[0]), ("bonus",))
    rejected = np.flatnonzero(~keep)
    num_accepted = int(rejected[0]) if len(rejected) else len(keep)
    met = _met(scores, num_accepted, counts)
    exceptions = tuple(record for record in met if record.index < num_accepted)
    tiers: list[Tier] = ["accepted"] * num_accepted
    for exception in exceptions:
        tiers[exception.index] = "exception"
    tiers.append("bonus" if num_accepted == len(keep) else "recovered")
    return Verdict(
        num_accepted,
        int(scores.next_ids[num_accepted]),
        tuple(tiers),
        exceptions,
        met[-1] if len(met) > len(exceptions) else None,
    )


def _met(scores: ScoreTable, num_accepted: int, counts: Sequence[int] | None) -> list[ExceptionRecord]:
    """The mismatches among the accepted tokens and the one behind them."""
    places = np.flatnonzero(scores.mismatch[: num_accepted + 1]).tolist()
    if not places:
        return []
    regret = scores.regret
    return [
        ExceptionRecord(
            place,
            int(scores.draft_ids[place]),
            int(scores.next_ids[place]),
            float(regret[place]),
            0 if counts is None else counts[place],
        )
        for place in places
    ]
