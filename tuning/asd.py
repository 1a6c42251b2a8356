"""ASD's built-in calibration (arXiv 2608.03447): the budget of a profile from what strict rejects first."""

import math
from collections.abc import Sequence

import numpy as np

from serving.config_rules import AsdRule
from serving.errors import DrafthouseError
from serving.rules.asd import weights
from tuning.mismatches import Mismatch, calibration_of

QUARTILE = 25.0
LEAST_MISMATCHES = 20
_NO_CAP = 64


def calibrated(mismatches: Sequence[Mismatch], *, provenance: str) -> AsdRule:
    """B = g = the first quartile of r / q over first rejections with 0 < r < inf, q normalised, M = 1.

    Raises DrafthouseError where there are too few to tell.
    """
    ratios = [
        mismatch.regret / weights(mismatch.size, "normalised", _NO_CAP)[mismatch.place]
        for mismatch in mismatches
        if 0.0 < mismatch.regret < math.inf
    ]
    if len(ratios) < LEAST_MISMATCHES:
        raise DrafthouseError(
            f"only {len(ratios)} drafted tokens were rejected, and {LEAST_MISMATCHES} are needed; give more prompts or "
            "more tokens"
        )
    limit = round(float(np.percentile(ratios, QUARTILE)), 6)
    return AsdRule(
        budget=limit,
        gate=limit,
        max_exceptions=1,
        q="normalised",
        calibration=calibration_of(mismatches, provenance=provenance),
    )
