"""DIMR, what a slim verifier's distribution costs against the target's (VIA-SD, arXiv 2606.12243, mask search).

n rows, V tokens. q is the target's distribution and q' the slim verifier's. The cost of a row is

    sum over v of  q'(v) relu(ln(1 - alpha) + ln q'(v)/q(v))  +  q(v) relu(ln beta + ln q'(v)/q(v))

It is no divergence: it is zero iff q' nowhere exceeds q / max(1 - alpha, beta), however flat q' may be.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from serving.types import Floats

ALPHA, BETA = 0.5, 0.3
_BLOCK = 4  # rows that stay in cache while they are compared


@dataclass(frozen=True)
class Agreement:
    """Means over n rows: DIMR cost and Kullback-Leibler divergence of q' from q (nats), share of equal argmaxes."""

    cost: float
    kl: float
    top1: float


ByDialogue: TypeAlias = Sequence[tuple[int, Agreement]]  # rows, and the means over them


def compare(log_q: Floats, log_slim: Floats, *, alpha: float = ALPHA, beta: float = BETA) -> Agreement:
    """Of log probabilities [n, V] of the target and of the slim verifier on the same positions."""
    parts = []
    for start in range(0, len(log_q), _BLOCK):
        q, slim = log_q[start : start + _BLOCK], log_slim[start : start + _BLOCK]
        costs = dimr(q, slim, alpha=alpha, beta=beta)
        kl = np.sum(np.exp(q) * (q - slim), axis=1)
        top1 = q.argmax(axis=1) == slim.argmax(axis=1)
        parts.append((len(q), Agreement(float(costs.mean()), float(kl.mean()), float(top1.mean()))))
    return mean(parts)


def dimr(log_q: Floats, log_slim: Floats, *, alpha: float = ALPHA, beta: float = BETA) -> npt.NDArray[np.float64]:
    """float64 [n]: the cost of each row."""
    ratio = log_slim - log_q
    over = np.exp(log_slim) * np.maximum(ratio + math.log(1.0 - alpha), 0.0)
    under = np.exp(log_q) * np.maximum(ratio + math.log(beta), 0.0)
    total: npt.NDArray[np.float64] = np.sum(over + under, axis=1, dtype=np.float64)
    return total


def mean(parts: ByDialogue) -> Agreement:
    """Of parts with so many rows each."""
    rows = sum(count for count, _ in parts)
    return Agreement(
        *(sum(count * getattr(part, name) for count, part in parts) / rows for name in ("cost", "kl", "top1"))
    )
