"""CSD's calibration (arXiv 2604.13634): how often each pair ends a block, counted over an unlabelled corpus."""

from collections import Counter
from collections.abc import Iterable, Sequence

from serving.memory.correction import EMPTY_COUNTS, PairCounts, pair_of
from tuning.mismatches import Mismatch


def count_pairs(mismatches: Iterable[Mismatch], *, held_ids: frozenset[int], max_pairs: int) -> PairCounts:
    """Counts of rejected pairs, without stops and special tokens, which may never be rescued."""
    seen = Counter(
        pair_of(one.draft_id, one.target_id) for one in mismatches if not {one.draft_id, one.target_id} & held_ids
    )
    return EMPTY_COUNTS.merged(PairCounts(dict(seen)), max_pairs=max_pairs)


def pareto_share(counts: Sequence[int], *, top: float = 0.2) -> float:
    """The share of all divergences that the most frequent `top` of the pairs make up; 0 without any."""
    ordered = sorted(counts, reverse=True)
    num_top = max(1, round(top * len(ordered)))
    return sum(ordered[:num_top]) / sum(ordered) if ordered else 0.0
