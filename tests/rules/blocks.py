"""Random blocks for the rules: few tokens and small integer logits, so that ties are common."""

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from serving.types import ScoreTable, as_ids

VOCAB = 5


def table(draft: list[int], rows: npt.NDArray[np.float32]) -> ScoreTable:
    """Greedy score table of a block from logits [K + 1, V]."""
    top = rows.argmax(axis=1).astype(np.int32)
    logits = rows.max(axis=1)
    picked = rows[np.arange(len(draft)), draft] if draft else np.zeros(0)
    return ScoreTable(
        draft_ids=as_ids(draft),
        next_ids=top,
        next_logits=logits.astype(np.float32),
        draft_logits=picked.astype(np.float32),
        top_ids=top,
        top_logits=logits.astype(np.float32),
    )


@st.composite
def blocks(draw: st.DrawFn, *, impossible: bool = False) -> ScoreTable:
    """Blocks of up to six drafted tokens; with `impossible` some logits are -inf."""
    size = draw(st.integers(0, 6))
    draft = draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
    logit = st.sampled_from([-3.0, -1.5, -1.0, 0.0, 0.0, 0.1, 0.2, 0.3, 1.0] + [-np.inf] * impossible)
    values = draw(st.lists(logit, min_size=VOCAB * (size + 1), max_size=VOCAB * (size + 1)))
    rows = np.array(values, dtype=np.float32).reshape(size + 1, VOCAB)
    rows[np.isneginf(rows).all(axis=1), 0] = 0.0  # something is always possible
    return table(draft, rows)


def some(draw: st.DrawFn, *values: float) -> float:
    return draw(st.sampled_from(values))
