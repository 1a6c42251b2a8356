"""What the yield predictor sees of a cache draft: about twenty numbers, the same in serving and in training.

HVD (arXiv 2606.01019): the match, the position, recent history, and the structure of the draft; no logits, no hidden
states. Nothing here depends on what comes after the position that a draft continues.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

import numpy as np

from serving.drafters.token_kinds import Kind, TokenKinds
from serving.memory.lookup import SuffixMatch
from serving.types import Floats, Ids

NUM_RECENT = 3
_ACCEPTED_MEMORY = 0.8  # weight of the past after each draft
_CHOICE_MEMORY = 0.9
_PLACE = Struct(f"=2i{3 + NUM_RECENT}f")  # the struct Place of yields.cpp
_MARKS = tuple(bytes(flags & kind > 0 for flags in range(256)) for kind in Kind)  # flags to 1 where they have the kind

FEATURES = (
    "score",
    "match_length",
    "draft_length",
    "mean_probability",
    "last_probability",
    "is_local",
    "prompt_length",
    "generated_length",
    "relative_position",
    *(f"accepted_{age}_ago" for age in range(1, NUM_RECENT + 1)),
    "accepted_average",
    "cache_accepted_average",
    "cache_rate",
    *(f"{kind.name.lower()}_{what}" for kind in Kind for what in ("share", "first") if kind.name),
)


@dataclass(slots=True)
class History:
    """Recent drafts of one session: accepted lengths, newest first; their averages; how often the cache drafted."""

    recent: tuple[float, ...] = (0.0,) * NUM_RECENT
    accepted: float = 0.0
    cache_accepted: float = 0.0
    cache_rate: float = 0.5

    def add(self, num_accepted: int, *, is_cache: bool) -> None:
        """One settled draft with K > 0."""
        self.recent = (float(num_accepted), *self.recent[:-1])
        self.accepted += (1.0 - _ACCEPTED_MEMORY) * (num_accepted - self.accepted)
        if is_cache:
            self.cache_accepted += (1.0 - _ACCEPTED_MEMORY) * (num_accepted - self.cache_accepted)
        self.cache_rate += (1.0 - _CHOICE_MEMORY) * (is_cache - self.cache_rate)


class Position(NamedTuple):
    """Where a draft would go: tokens of the prompt, and tokens emitted so far."""

    prompt_len: int
    num_emitted: int


def packed_place(position: Position, history: History) -> bytes:
    """Both as compiled code reads them."""
    return _PLACE.pack(
        *position, *history.recent, history.accepted, history.cache_accepted, history.cache_rate
    )  # fmt: skip


def features(match: SuffixMatch, position: Position, history: History, kinds: TokenKinds) -> list[float]:
    """One number for each name in FEATURES; `match` must not be empty."""
    size = len(match)
    return [
        match.score,
        match.match_length,
        size,
        match.score / size,
        match.probabilities.item(-1),
        float(match.is_local),
        position.prompt_len,
        position.num_emitted,
        position.num_emitted / (position.prompt_len + position.num_emitted),
        *history.recent,
        history.accepted,
        history.cache_accepted,
        history.cache_rate,
        *_structure(match.ids, kinds),
    ]


def feature_rows(rows: Sequence[Sequence[float]]) -> Floats:
    """f32[B, F]"""
    return np.array(rows, dtype=np.float32).reshape(-1, len(FEATURES))


def _structure(ids: Ids, kinds: TokenKinds) -> list[float]:
    """Of each kind the share of the draft's tokens, and the place of the first as a share of its length (1: none)."""
    size = len(ids)
    found = kinds.take(ids, mode="clip").tobytes()
    numbers: list[float] = []
    for marks in _MARKS:
        marked = found.translate(marks)
        first = marked.find(1)
        numbers += (marked.count(1) / size, first / size) if first >= 0 else (0.0, 1.0)
    return numbers
