"""An EAGLE-3 head as a ScoringModel, so that whatever drafts with a draft LM drafts with it.

Position p of the head stands for the feature of p and the token at p + 1. Where the target has been, the feature is
its own; where it has not (the tokens being drafted, or those that another tier has decided), the head's output of
position p - 1 stands in, and is replaced once the target has caught up. So after a round without this drafter nothing
is special: the positions it missed are read, with the target's features, when it next drafts.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from serving.models.eagle3_runner import DraftingRunner, Eagle3Runner
from serving.models.kv_store import KVStore, Row
from serving.models.packed import CATCH_UP, Segment, pack
from serving.models.scores import score_tables
from serving.protocols import ScoreRequest
from serving.types import Draft, DraftStops, Ids, ScoreTable

log = logging.getLogger(__name__)

# Outputs kept for each row, of its last positions: those on stand-ins (a tier's unverified tokens and a draft) begin
# behind the oldest, and the newest must not take its place.
KEPT = 128


class FeatureSource(Protocol):
    """The target's features of a session, as far as they are known."""

    def features(self, session_id: str, ids: Ids, start: int) -> Tensor:
        """[n, F] of the positions of `ids` from `start` on, n <= len(ids) - start. KeyError without such a session."""
        ...


@dataclass(eq=False)
class _Reading:
    """One request while its positions are read; `next` is the first position still to be read.

    `is_cut`: the target's features go on behind what was read, and a later call reads them.
    """

    request: ScoreRequest
    row: Row
    next: int
    out: Tensor | None = None
    is_cut: bool = False

    @property
    def following(self) -> Ids:
        """i32[n - 1]: the token that each position is paired with."""
        return self.request.ids[1:]

    @property
    def num_left(self) -> int:
        return len(self.following) - self.next

    @property
    def next_segment(self) -> Segment:
        """One position."""
        return Segment(self.row, self.following, self.next, self.next + 1)

    @property
    def is_done(self) -> bool:
        return self.num_left <= 0


@dataclass(frozen=True, eq=False)
class _Unread:
    """Positions of a request that are read in one pass, with the target's features or, one alone, on a stand-in."""

    reading: _Reading
    segment: Segment
    features: Tensor | None = None

    @property
    def is_last(self) -> bool:
        """Whether the token behind the text comes of it."""
        return self.segment.stop == len(self.reading.following)


class Eagle3LM:
    """Implements ScoringModel for one row a request (drafting); its KV rows hold one layer.

    A request is None, and gets no draft, while the target knows no feature of it, or not all known ones were read.
    """

    def __init__(
        self, runner: Eagle3Runner, store: KVStore, features: FeatureSource, *, target_ids: Tensor, hidden: int,
        prefill_chunk: int, with_logsumexp: bool = False,
    ) -> None:  # fmt: skip
        self._runner = runner
        self._drafting = runner if isinstance(runner, DraftingRunner) else None
        self._store = store
        self._features = features
        self._target_ids = target_ids
        self._prefill_chunk = prefill_chunk
        self._with_logsumexp = with_logsumexp
        # By row: the outputs of its last positions, and how many leading positions stand on the target's features.
        self._outputs = torch.zeros(store.num_rows, KEPT, hidden, device=store.device)
        self._num_true = np.zeros(store.num_rows, dtype=np.int64)

    def open(self, session_id: str, ids: Ids, *, salt: str = "") -> int:
        """Prefixes are not shared: to read a prompt anew costs one layer."""
        self._store.open(session_id, ids[:0], salt=salt)
        row = self._store.row(session_id)
        row.length, self._num_true[row.index] = 0, 0
        return 0

    def close(self, session_id: str) -> None:
        self._store.close(session_id)

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreTable | None]:
        """The token behind each text, in the target's ids. Raises ValueError for more than one row a request.

        Prompts share `prefill_chunk` positions a call, first come first served.
        """
        if any(request.num_rows != 1 for request in requests):
            raise ValueError("an EAGLE-3 head only drafts: num_rows must be 1")
        with torch.inference_mode():
            readings = [self._start(request) for request in requests]
            self._read_true(self._known(readings))
            while waiting := [reading for reading in readings if self._may_go_on(reading)]:
                self._read_stand_ins(waiting)
            return list(self._tables(readings))

    def draft(self, requests: Sequence[ScoreRequest], stops: DraftStops) -> list[Draft | None] | None:
        """Greedy drafts behind each text, in one call; None for one that has nothing to draft from, as `score` has it.

        None for all where this head must be asked token by token.
        """
        if self._drafting is None:
            return None
        with torch.inference_mode():
            readings = [self._start(request) for request in requests]
            lasts = self._read_up_to_last(readings)
            if not lasts:
                return [None] * len(requests)
            indices = [readings.index(one.reading) for one in lasts]
            room = [self._last_kept(one.segment.row) - one.segment.stop + 2 for one in lasts]
            most = np.minimum(stops.most[indices], room)
            for one in lasts:
                one.segment.row.length = min(one.segment.row.length, one.segment.start)  # see `_read`
            said = self._drafting.draft(
                self._inputs(lasts), self._outputs, pack([one.segment for one in lasts], self._store), self._store,
                DraftStops(most, stops.floors[indices], stops.least),
            )  # fmt: skip
        drafts: list[Draft | None] = [None] * len(requests)
        for i, (index, one) in enumerate(zip(indices, lasts, strict=True)):
            drafts[index] = draft = said.of(i)
            self._follow(one.segment, draft)
        return drafts

    def _follow(self, segment: Segment, draft: Draft) -> None:
        """Note that the row has now read `segment` and what was drafted behind it but the last token said."""
        row, read = segment.row, draft.ids[: max(0, draft.num_passes - 1)]
        row.ids[segment.start : segment.stop] = segment.ids[segment.start : segment.stop]
        row.ids[segment.stop : segment.stop + len(read)] = read
        row.length = segment.stop + len(read)

    def _last_kept(self, row: Row) -> int:
        """The last position whose output does not take the place of that of the last true one."""
        return int(self._num_true[row.index]) + KEPT - 2

    def _start(self, request: ScoreRequest) -> _Reading:
        row = self._store.row(request.session_id)
        held = row.shared_prefix(request.ids[1:])
        row.length = held
        start = min(held, max(0, len(request.ids) - 2))  # the last position is read anew: its output was not kept
        self._num_true[row.index] = min(int(self._num_true[row.index]), start)
        return _Reading(request, row, start)

    def _known(self, readings: Sequence[_Reading]) -> list[_Unread]:
        """What this call reads of the positions, of all requests, whose features the target knows."""
        budget = self._prefill_chunk
        found: list[_Unread] = []
        for reading in readings:
            start = int(self._num_true[reading.row.index])
            known = self._features.features(reading.request.session_id, reading.request.ids[:-1], start)
            if len(known) > CATCH_UP + 1:
                reading.is_cut = len(known) > budget
                known = known[:budget]
                budget -= len(known)
            if len(known):
                segment = Segment(reading.row, reading.following, start, start + len(known))
                found.append(_Unread(reading, segment, known))
        return found

    def _read_true(self, unread: Sequence[_Unread]) -> None:
        """Read positions whose features are known; one pass."""
        if not unread:
            return
        self._read([one.reading for one in unread], [one.segment for one in unread], self._inputs(unread))
        for one in unread:
            self._num_true[one.segment.row.index] = one.segment.stop

    def _read_up_to_last(self, readings: Sequence[_Reading]) -> list[_Unread]:
        """What the drafts begin with, nothing where nothing can be drafted; everything before it has been read."""
        known = self._known(readings)
        lasts = [one for one in known if one.is_last]
        self._read_true([one for one in known if not one.is_last])
        begun = {one.reading for one in lasts}
        others = [reading for reading in readings if reading not in begun and self._may_go_on(reading)]
        while waiting := [reading for reading in others if reading.num_left > 1 and self._may_go_on(reading)]:
            self._read_stand_ins(waiting)
        for one in lasts:  # should the pass fail, `_start` finds how far the row is
            self._num_true[one.segment.row.index] = one.segment.stop
        return lasts + [_Unread(reading, reading.next_segment) for reading in others if self._may_go_on(reading)]

    def _inputs(self, unread: Sequence[_Unread]) -> Tensor:
        """g [N, H] of all positions: those with features come first."""
        true = [one.features for one in unread if one.features is not None]
        stand_ins = [one.segment for one in unread if one.features is None]
        parts = [self._runner.project(torch.cat(true))] if true else []
        if stand_ins:
            before = self._slots([s.row.index for s in stand_ins], [(s.start - 1) % KEPT for s in stand_ins])
            parts.append(self._outputs.flatten(0, 1).index_select(0, before))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _may_go_on(self, reading: _Reading) -> bool:
        """Whether there is more to read, whose feature the target lacks and the output before is kept."""
        is_kept = 0 < reading.next <= self._last_kept(reading.row)
        return bool(is_kept and not reading.is_done and not reading.is_cut)

    def _read_stand_ins(self, readings: Sequence[_Reading]) -> None:
        """One position of each request, on the head's own output of the one before."""
        unread = [_Unread(reading, reading.next_segment) for reading in readings]
        self._read(readings, [one.segment for one in unread], self._inputs(unread))

    def _read(self, readings: Sequence[_Reading], segments: Sequence[Segment], g: Tensor) -> None:
        for segment in segments:  # should the pass fail, nobody takes half-written slots for what they were
            segment.row.length = min(segment.row.length, segment.start)
        out = self._runner.forward(g, pack(segments, self._store), self._store)
        ends = np.cumsum([segment.stop - segment.start for segment in segments])
        last = out.index_select(0, torch.from_numpy(ends - 1).to(out.device))
        kept = self._slots([s.row.index for s in segments], [(s.stop - 1) % KEPT for s in segments])
        self._outputs.flatten(0, 1).index_copy_(0, kept, last.float())
        for reading, segment, one in zip(readings, segments, last, strict=True):
            segment.row.ids[segment.start : segment.stop] = segment.ids[segment.start : segment.stop]
            segment.row.length = reading.next = segment.stop
            reading.out = one

    def _slots(self, rows: Sequence[int], places: Sequence[int]) -> Tensor:
        """Where the kept outputs of `rows` stand in one list of them all; for why see `KVStore.keep_features`."""
        flat = [row * KEPT + place for row, place in zip(rows, places, strict=True)]
        return torch.tensor(flat, device=self._outputs.device)

    def _tables(self, readings: Sequence[_Reading]) -> Iterator[ScoreTable | None]:
        done = [reading for reading in readings if reading.is_done and reading.out is not None]
        if not done:
            return iter([None] * len(readings))
        logits = self._runner.logits(torch.stack([reading.out for reading in done if reading.out is not None]))
        tables = iter(score_tables(
            logits, [reading.request for reading in done],
            id_map=self._target_ids, with_logsumexp=self._with_logsumexp,
        ))  # fmt: skip
        return (next(tables) if reading.is_done and reading.out is not None else None for reading in readings)
