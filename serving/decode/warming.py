"""The first pass of a model, before the first request pays for it."""

from serving.protocols import ScoreRequest, ScoringModel
from serving.types import as_ids


def warm_up(model: ScoringModel, *, num_rows: int = 5) -> None:
    """Run the shapes that decoding will use once, so that the first request does not pay for them."""
    ids = as_ids([1] * (num_rows + 1))
    model.open("warm-up", ids)
    for rows in (1, num_rows):
        model.score([ScoreRequest("warm-up", ids, num_rows=rows)])
    model.close("warm-up")
