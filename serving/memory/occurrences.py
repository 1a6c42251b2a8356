"""Occurrences of a context in a token array, and the greedy path that follows them.

A suffix tree without nodes: a node is the set of places where its string occurs, so a set of positions stands
for the node, and filtering the set walks to a child (SuffixDecoding, arXiv 2411.04975).

Legend
    tokens     i32[T]  sequences separated by SENTINEL; tokens[0] and tokens[-1] are SENTINEL
    positions  ip[N]   occurrences of a context, each the index of the token that FOLLOWS it, never a SENTINEL
    context    i32[C]  the last C tokens of the sequence, newest first
    depths     i32[N]  how many tokens of the context match before each position
    K          tokens of a path;  L  the longest path allowed

No match and no path crosses a SENTINEL. A place where nothing follows the context is no occurrence, and one
that reaches the end of its sequence along a path leaves the count there: the conditional probability of a
token is count(token) / (occurrences on the path that still have a next token).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import floor, fsum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from serving.types import Ids

Positions: TypeAlias = npt.NDArray[np.intp]

SENTINEL = -1
_BLOCK = 2048  # elements compared at once while matching backwards, but at least _STRIDE tokens of each
_STRIDE = 4
EXAMINED = 8  # times max_occurrences: how many recent occurrences are tried for a longer match


@dataclass(frozen=True, slots=True)
class PathLimits:
    """Where a path ends: at floor(m * factor + offset) tokens, at max_draft, or below min_prob."""

    max_draft: int
    factor: float
    offset: float
    min_prob: float

    def length(self, match_length: int) -> int:
        """Longest path after a match; never falls as match_length grows. Also bounds the path's score."""
        return min(self.max_draft, max(0, floor(match_length * self.factor + self.offset)))


@dataclass(frozen=True, slots=True)
class Level:
    """One match length and its occurrences, gathered only when they are wanted."""

    match_length: int
    collect: Callable[[], Positions]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A greedy path: ids and path probabilities, both K long; score is the sum of the probabilities."""

    match_length: int
    ids: list[int]
    probabilities: list[float]
    score: float


NO_CANDIDATE = Candidate(0, [], [], 0.0)


def best_candidate(tokens: Ids, levels: Iterable[Level], *, limits: PathLimits, floor_score: float) -> Candidate:
    """Best path over `levels`, which come longest match first; candidates below `floor_score` may be missed.

    A path of L tokens scores at most L, and L falls with the match length: once it cannot beat the best, no
    later level can, and an equal score loses to the longer match found before.
    """
    best = NO_CANDIDATE
    for level in levels:
        limit = limits.length(level.match_length)
        if limit <= best.score or limit < floor_score:
            break
        path = greedy_path(tokens, level.collect(), limit=limit, min_prob=limits.min_prob)
        score = fsum(path.probabilities)
        if score > best.score:
            best = Candidate(level.match_length, path.ids, path.probabilities, score)
    return best


def deep_levels(
    tokens: Ids, positions: Positions, *, context: Ids, known: int, max_occurrences: int
) -> Iterator[Level]:
    """Levels of match length >= `known`, longest first; `positions` are the occurrences of context[:known].

    Equal sets give equal paths up to their limits, so of each distinct set only the longest match (a value in
    depths) is a level: its path extends the others', scores at least as much, and wins the ties.
    """
    depths = match_depths(tokens, positions, context=context, known=known)
    for match_length in np.flatnonzero(np.bincount(depths))[::-1].tolist():
        yield Level(match_length, partial(_at_depth, positions, depths, match_length, max_occurrences))


def _at_depth(positions: Positions, depths: Ids, match_length: int, max_occurrences: int) -> Positions:
    return most_recent(positions[depths >= match_length], max_occurrences)


def most_recent(positions: Positions, count: int) -> Positions:
    """The `count` highest positions, in any order; all of them if there are no more."""
    surplus = positions.size - count
    return positions if surplus <= 0 else np.partition(positions, surplus)[surplus:]


def match_depths(tokens: Ids, positions: Positions, *, context: Ids, known: int) -> Ids:
    """How far `context` matches backwards before each position, from the `known` tokens that already do."""
    depths = np.full(positions.size, known, dtype=np.int32)
    alive = np.arange(positions.size)
    while alive.size and known < context.size:
        width = min(context.size - known, max(_STRIDE, _BLOCK // alive.size))
        before = positions[alive, np.newaxis] - np.arange(known + 1, known + width + 1)
        differs = np.ones((alive.size, width + 1), dtype=np.bool)  # the last column ends every match
        # "clip" maps what lies before the array to tokens[0], a SENTINEL, which matches nothing.
        np.not_equal(tokens.take(before, mode="clip"), context[known : known + width], out=differs[:, :-1])
        matched = differs.argmax(axis=1)
        depths[alive] = known + matched
        alive = alive[matched == width]
        known += width
    return depths


@dataclass(frozen=True, slots=True)
class Path:
    """ids and path probabilities of a greedy walk, both K long."""

    ids: list[int]
    probabilities: list[float]


def greedy_path(tokens: Ids, positions: Positions, *, limit: int, min_prob: float) -> Path:
    """The most frequent next token (lowest id on ties), again and again, until `limit` or below `min_prob`.

    The path probability is a ratio of integers, rounded once: ties and the edge at `min_prob` are exact.
    """
    if positions.size == 1:
        return _only_path(tokens, int(positions[0]), limit)
    ids: list[int] = []
    probabilities: list[float] = []
    numerator = denominator = 1
    window = _followers(tokens, positions, limit)
    while window.size:
        agreed = _agreed(window)
        ids += agreed.tolist()
        probabilities += [numerator / denominator] * agreed.size
        if agreed.size == len(window):
            break
        following = window[agreed.size]
        alternatives, counts = np.unique(following[following != SENTINEL], return_counts=True)
        if not counts.size:
            break
        winner = counts.argmax()
        numerator *= int(counts[winner])
        denominator *= int(counts.sum())
        if numerator / denominator < min_prob:
            break
        ids.append(int(alternatives[winner]))
        probabilities.append(numerator / denominator)
        window = window[agreed.size + 1 :].compress(following == alternatives[winner], axis=1)
    return Path(ids, probabilities)


def _only_path(tokens: Ids, position: int, limit: int) -> Path:
    ids = tokens[position : position + limit].tolist()
    if SENTINEL in ids:
        ids = ids[: ids.index(SENTINEL)]
    return Path(ids, [1.0] * len(ids))


def _followers(tokens: Ids, positions: Positions, limit: int) -> Ids:
    """i32[L, N]: the tokens from each position on, SENTINEL from the end of its sequence on."""
    window: Ids = tokens.take(np.arange(limit)[:, np.newaxis] + positions, mode="clip")
    ended = window == SENTINEL
    if ended.any():
        window[np.logical_or.accumulate(ended, axis=0)] = SENTINEL
    return window


def _agreed(window: Ids) -> Ids:
    """The tokens of the leading rows of i32[L, N] that hold one token wherever not ended: i32[<= L]."""
    highest: Ids = window.max(axis=1)
    lowest = window.view(np.uint32).min(axis=1)  # as unsigned, SENTINEL is above every token
    agree = highest == lowest  # by value, so never where every row has ended
    return highest if agree.all() else highest[: agree.argmin()]
