"""The only acceptance code: every rule computes a mask, and this turns it into a verdict."""

import numpy as np
import numpy.typing as npt

from serving.types import ScoreTable, Tier, Verdict


def accept_prefix(scores: ScoreTable, keep: npt.NDArray[np.bool_]) -> Verdict:
    """Accept draft tokens up to the first one not in `keep` (bool[K]), then emit the target's own token.

    The token after a rejection is *recovered*, the one after a fully accepted block is the *bonus*; both are
    `next_ids` of the row that follows the accepted prefix. `next_ids` may be a sample, so this is greedy
    and sampled decoding in one.
    """
    rejected = np.flatnonzero(~keep)
    num_accepted = int(rejected[0]) if len(rejected) else len(keep)
    mismatch = scores.mismatch
    tiers: tuple[Tier, ...] = tuple("exception" if mismatch[i] else "accepted" for i in range(num_accepted))
    last: Tier = "bonus" if num_accepted == len(keep) else "recovered"
    return Verdict(num_accepted, int(scores.next_ids[num_accepted]), (*tiers, last))
