"""An EAGLE-3 head as a ScoringModel, so that whatever drafts with a draft LM drafts with it.

Position p of the head stands for the feature of p and the token at p + 1. Where the target has been, the feature is
its own; where it has not (the tokens being drafted, or those that another tier has decided), the head's output of
position p - 1 stands in, and is replaced once the target has caught up. So after a round without this drafter nothing
is special: the positions it missed are read, with the target's features, when it next drafts.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from serving.models.attention import has_flash
from serving.models.eagle3 import NUM_FEATURES
from serving.models.eagle3_checkpoint import load_eagle3
from serving.models.eagle3_runner import Eagle3Runner, kv_shape, runner_of
from serving.models.kv_store import KVStore, Row
from serving.models.loading import LoadOptions, default_device, torch_dtype
from serving.models.memory_plan import MemoryPlan, PlannedItem, reserve
from serving.models.packed import CATCH_UP, Segment, pack
from serving.models.scores import score_tables
from serving.protocols import ScoreRequest
from serving.types import Ids, ScoreTable, as_ids

log = logging.getLogger(__name__)

# Outputs kept for each row, of its last positions: those on stand-ins (a tier's unverified tokens and a draft) begin
# behind the oldest, and the newest must not take its place.
_KEPT = 128
_WARM_UP = CATCH_UP  # positions: a prompt that is read in one call whatever the chunk


class FeatureSource(Protocol):
    """The target's features of a session, as far as they are known."""

    def features(self, session_id: str, ids: Ids, start: int) -> Tensor:
        """[n, F] of the positions of `ids` from `start` on, n <= len(ids) - start. KeyError without such a session."""
        ...


@dataclass
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
    def is_done(self) -> bool:
        return self.next >= len(self.following)


class Eagle3LM:
    """Implements ScoringModel for one row a request (drafting); its KV rows hold one layer.

    A request is None, and gets no draft, while the target knows no feature of it, or not all known ones were read.
    """

    def __init__(
        self, runner: Eagle3Runner, store: KVStore, features: FeatureSource, *, target_ids: Tensor, hidden: int,
        prefill_chunk: int, with_logsumexp: bool = False,
    ) -> None:  # fmt: skip
        self._runner = runner
        self._store = store
        self._features = features
        self._target_ids = target_ids
        self._prefill_chunk = prefill_chunk
        self._with_logsumexp = with_logsumexp
        # By row: the outputs of its last positions, and how many leading positions stand on the target's features.
        self._outputs = torch.zeros(store.num_rows, _KEPT, hidden, device=store.device)
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
            self._read_true(readings)
            while waiting := [reading for reading in readings if self._may_go_on(reading)]:
                self._read_stand_ins(waiting)
            return list(self._tables(readings))

    @property
    def has_chains(self) -> bool:
        """Whether `chain` can say anything."""
        return self._runner.has_chains

    def chain(self, requests: Sequence[ScoreRequest], count: int) -> list[Ids] | None:
        """`count` greedy tokens behind each text, whose last token this head has just said; None where it must be asked
        token by token.
        """
        rows = [self._store.row(request.session_id) for request in requests]
        if not all(self._has_just_said(row, request, count) for row, request in zip(rows, requests, strict=True)):
            return None
        starts = [row.length for row in rows]
        segments = [Segment(row, r.ids[1:], row.length, row.length + 1) for row, r in zip(rows, requests, strict=True)]
        with torch.inference_mode():
            before = self._slots([row.index for row in rows], [(start - 1) % _KEPT for start in starts])
            g = self._outputs.flatten(0, 1).index_select(0, before)
            found = self._runner.chain(g, pack(segments, self._store), self._store, count)
            if found is None:
                return None
            tokens, outs = found
            for i, out in enumerate(outs):  # not all at once: see `KVStore.keep_features`
                kept = self._slots([row.index for row in rows], [(start + i) % _KEPT for start in starts])
                self._outputs.flatten(0, 1).index_copy_(0, kept, out)
        said = [as_ids(column) for column in tokens.T.cpu().numpy()]
        for row, start, request, one in zip(rows, starts, requests, said, strict=True):
            row.ids[start] = request.ids[-1]
            row.ids[start + 1 : start + count] = one[:-1]
            row.length = start + count
        return said

    def _has_just_said(self, row: Row, request: ScoreRequest, count: int) -> bool:
        """Whether `count` positions can be read on, from the one that the last token of the text came from."""
        is_next = row.length == len(request.ids) - 2 == row.shared_prefix(request.ids[1:])
        return is_next and row.length > 0 and row.length + count - 1 <= self._last_kept(row)

    def _last_kept(self, row: Row) -> int:
        """The last position whose output does not take the place of that of the last true one."""
        return int(self._num_true[row.index]) + _KEPT - 2

    def _start(self, request: ScoreRequest) -> _Reading:
        row = self._store.row(request.session_id)
        held = row.shared_prefix(request.ids[1:])
        row.length = held
        start = min(held, max(0, len(request.ids) - 2))  # the last position is read anew: its output was not kept
        self._num_true[row.index] = min(int(self._num_true[row.index]), start)
        return _Reading(request, row, start)

    def _read_true(self, readings: Sequence[_Reading]) -> None:
        """What this call reads of the positions, of all requests, whose features the target knows; one pass."""
        budget = self._prefill_chunk
        found: list[tuple[_Reading, Segment]] = []
        features: list[Tensor] = []
        for reading in readings:
            start = int(self._num_true[reading.row.index])
            known = self._features.features(reading.request.session_id, reading.request.ids[:-1], start)
            if len(known) > CATCH_UP + 1:
                reading.is_cut = len(known) > budget
                known = known[:budget]
                budget -= len(known)
            if len(known):
                found.append((reading, Segment(reading.row, reading.following, start, start + len(known))))
                features.append(known)
        if not found:
            return
        self._read([reading for reading, _ in found], [segment for _, segment in found],
                   self._runner.project(torch.cat(features)))  # fmt: skip
        for reading, segment in found:
            self._num_true[reading.row.index] = segment.stop

    def _may_go_on(self, reading: _Reading) -> bool:
        """Whether there is more to read, whose feature the target lacks and the output before is kept."""
        is_kept = 0 < reading.next <= self._last_kept(reading.row)
        return bool(is_kept and not reading.is_done and not reading.is_cut)

    def _read_stand_ins(self, readings: Sequence[_Reading]) -> None:
        """One position of each request, on the head's own output of the one before."""
        rows = [reading.row.index for reading in readings]
        slots = [(reading.next - 1) % _KEPT for reading in readings]
        segments = [Segment(r.row, r.following, r.next, r.next + 1) for r in readings]
        self._read(readings, segments, self._outputs.flatten(0, 1).index_select(0, self._slots(rows, slots)))

    def _read(self, readings: Sequence[_Reading], segments: Sequence[Segment], g: Tensor) -> None:
        for segment in segments:  # should the pass fail, nobody takes half-written slots for what they were
            segment.row.length = min(segment.row.length, segment.start)
        out = self._runner.forward(g, pack(segments, self._store), self._store)
        ends = np.cumsum([segment.stop - segment.start for segment in segments])
        last = out.index_select(0, torch.from_numpy(ends - 1).to(out.device))
        kept = self._slots([s.row.index for s in segments], [(s.stop - 1) % _KEPT for s in segments])
        self._outputs.flatten(0, 1).index_copy_(0, kept, last.float())
        for reading, segment, one in zip(readings, segments, last, strict=True):
            segment.row.ids[segment.start : segment.stop] = segment.ids[segment.start : segment.stop]
            segment.row.length = reading.next = segment.stop
            reading.out = one

    def _slots(self, rows: Sequence[int], places: Sequence[int]) -> Tensor:
        """Where the kept outputs of `rows` stand in one list of them all; for why see `KVStore.keep_features`."""
        flat = [row * _KEPT + place for row, place in zip(rows, places, strict=True)]
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


def load_eagle3_lm(model: str, *, target: str, features: FeatureSource, options: LoadOptions) -> Eagle3LM:
    """Load the head `model` for `target`, reserve its KV rows. Raises ModelError or MemoryPlanError, each one clear."""
    dtype, device = torch_dtype(options.dtype), default_device()
    head = load_eagle3(model, target=target, dtype=dtype).to(device)
    shape = kv_shape(head)
    matrices = (*head.parameters(), *head.buffers())
    plan = MemoryPlan.on(
        device,
        [
            PlannedItem(options.role, "weights", sum(matrix.nbytes for matrix in matrices)),
            PlannedItem(options.role, "KV rows", KVStore.planned_bytes(
                [shape], num_rows=options.kv_rows, capacity=options.capacity, dtype=dtype
            )),
            PlannedItem(options.role, "kept outputs", 4 * options.num_rows * _KEPT * head.config.hidden_size),
        ],
    )  # fmt: skip
    log.info("%s %s:\n%s", options.role, model, plan)
    plan.check()
    store = KVStore(
        [shape], options.num_rows, options.capacity, dtype, device,
        has_flash=has_flash([shape], options.capacity, dtype, device),
    )  # fmt: skip
    reserve(store, options.role)
    lm_with = partial(
        Eagle3LM, runner_of(head, max_length=options.capacity), store,
        target_ids=head.target_ids.to(device), hidden=head.config.hidden_size,
        prefill_chunk=options.prefill_chunk, with_logsumexp=options.with_logsumexp,
    )  # fmt: skip
    _warm_up(lm_with(features=_NoTarget(NUM_FEATURES * head.config.target_hidden_size)), options.capacity)
    return lm_with(features=features)


class _NoTarget:
    """Features that say nothing, of any text."""

    def __init__(self, width: int) -> None:
        self._width = width

    def features(self, session_id: str, ids: Ids, start: int) -> Tensor:
        return torch.zeros(len(ids) - start, self._width)


def _warm_up(lm: Eagle3LM, capacity: int) -> None:
    """Read a prompt and take one step, so that the first request does not pay for what happens once."""
    ids = as_ids([1] * min(_WARM_UP, capacity))
    lm.open("warm-up", ids)
    for length in (len(ids) - 1, len(ids)):
        lm.score([ScoreRequest("warm-up", ids[:length])])
    lm.close("warm-up")
