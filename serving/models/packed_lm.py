"""A causal LM with its own KV store, scored in packed batches: target, slim verifier and draft model alike."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from serving.models.kv_store import MIN_SHARED, KVStore, Row
from serving.models.packed import CATCH_UP, LayeredDecoder, Segment, pack
from serving.models.scores import score_tables
from serving.protocols import ScoreRequest
from serving.types import Ids, ScoreTable, common_prefix


@dataclass(frozen=True)
class HeadOptions:
    """What is done with logits: columns from `vocab_size` on are padding; `id_map` restores target ids."""

    vocab_size: int
    id_map: Tensor | None = None
    with_logsumexp: bool = False


class PackedLM:
    """Implements ScoringModel. A call carries whole sequences; only what the KV store lacks is computed.

    With `waits_for_prefixes` a prompt whose other half, or more, an earlier request of the same call is about to read
    gets None once and takes it over then.
    """

    def __init__(
        self,
        decoder: LayeredDecoder,
        store: KVStore,
        *,
        head: HeadOptions,
        prefill_chunk: int,
        waits_for_prefixes: bool = False,
    ) -> None:
        self._decoder = decoder
        self._store = store
        self._head = head
        self._prefill_chunk = prefill_chunk
        self._waits_for_prefixes = waits_for_prefixes

    @property
    def decoder(self) -> LayeredDecoder:
        return self._decoder

    @property
    def store(self) -> KVStore:
        return self._store

    @property
    def max_length(self) -> int:
        return self._store.capacity

    def with_decoder(self, decoder: LayeredDecoder, store: KVStore, *, with_logsumexp: bool) -> "PackedLM":
        """The same vocabulary and chunks over another decoder and its store."""
        head = replace(self._head, with_logsumexp=with_logsumexp)
        return PackedLM(decoder, store, head=head, prefill_chunk=self._prefill_chunk)

    def open(self, session_id: str, ids: Ids, *, salt: str = "") -> int:
        return self._store.open(session_id, ids, salt=salt)

    def close(self, session_id: str) -> None:
        self._store.close(session_id)

    def rollback(self, session_id: str, length: int) -> None:
        self._store.rollback(session_id, length)

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreTable | None]:
        """One packed pass. Prompts share `prefill_chunk` tokens a pass, first come first served; the rest waits."""
        segments = self._plan(requests)
        live = [segment for segment in segments if segment is not None]
        if not live:
            return [None] * len(requests)
        for segment in live:  # should the pass fail, nobody takes half-written slots for what they were
            segment.row.length = min(segment.row.length, segment.start)
        with torch.inference_mode():
            step = pack(live, self._store)
            hidden = self._decoder.forward(step, self._store)
            self._remember(live)
            scored = [
                request
                for request, segment in zip(requests, segments, strict=True)
                if segment is not None and segment.stop == len(request.ids)
            ]
            tables = iter(self._score_rows(hidden, live, scored))
        return [
            next(tables) if segment is not None and segment.stop == len(request.ids) else None
            for request, segment in zip(requests, segments, strict=True)
        ]

    def features(self, session_id: str, ids: Ids, start: int) -> Tensor:
        """[n, F]: what entered the feature layers at the positions of `ids` from `start` on, as far as they are known.

        n <= len(ids) - start: a text that is still being fed, or that no pass has seen, has none yet. Raises KeyError
        where the session has no row.
        """
        row = self._store.row(session_id)
        return self._store.features[row.index, start : row.shared_prefix(ids)]

    def all_logits(self, ids: Ids, *, first: int = 0) -> Tensor:
        """float32 [n - first, V]: the logits after every position of one text from `first` on, in one pass.

        For training, searches and audits.
        """
        _, hidden = self._read(ids, first=first)
        with torch.inference_mode():
            return self._decoder.logits(hidden)[:, : self._head.vocab_size]

    def all_features(self, ids: Ids) -> Tensor:
        """[n, F]: the features of every position of one text, in one pass; for training."""
        row, _ = self._read(ids, first=0)
        return self._store.features[row.index, : len(ids)].clone()  # the next text takes the same slots

    def _read(self, ids: Ids, *, first: int) -> tuple[Row, Tensor]:
        """One pass over a text; returns the row that holds it, free again, and the hidden [n - first, H] from there."""
        session_id = "whole text"
        start = min(first, self._store.open(session_id, ids))
        row = self._store.row(session_id)
        segments = [Segment(row, ids, start, len(ids))]
        with torch.inference_mode():
            hidden = self._decoder.forward(pack(segments, self._store), self._store)
        self._remember(segments)
        self.close(session_id)
        return row, hidden[first - start :]

    def _plan(self, requests: Sequence[ScoreRequest]) -> list[Segment | None]:
        """What each request computes in this pass: all it lacks, or a chunk of a long prompt, or nothing yet."""
        budget = self._prefill_chunk
        segments: list[Segment | None] = []
        for request in requests:
            row = self._store.row(request.session_id)
            # The rows to score are computed even if they are cached: their logits are not.
            held = row.shared_prefix(request.ids)
            if budget > 0 and len(request.ids) - held >= MIN_SHARED:
                held = self._store.adopt(row, request.ids)
                if self._is_worth_waiting(request, row, held, segments):
                    segments.append(None)
                    continue
            start = min(held, len(request.ids) - request.num_rows)
            lacking = len(request.ids) - start
            if lacking <= request.num_rows + CATCH_UP:
                segments.append(Segment(row, request.ids, start, len(request.ids)))
                continue
            fed = min(budget, lacking)
            if 0 < lacking - fed < request.num_rows:
                fed = lacking - request.num_rows  # never score half a block
            budget -= max(0, fed)
            segments.append(Segment(row, request.ids, start, start + fed) if fed > 0 else None)
        return segments

    def _is_worth_waiting(self, request: ScoreRequest, row: Row, held: int, planned: Sequence[Segment | None]) -> bool:
        """Whether this pass reads half or more of what a prompt lacks, for another request with the same prefix."""
        if not self._waits_for_prefixes:
            return False
        most = len(request.ids) - request.num_rows  # rows to score are computed in any case
        ahead = (
            min(most, common_prefix(segment.ids[: segment.stop], request.ids))
            for segment in planned
            if segment is not None and segment.row.salt == row.salt
        )
        gain = max(ahead, default=0) - held
        return gain >= MIN_SHARED and 2 * gain >= len(request.ids) - held

    def _remember(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            segment.row.ids[segment.start : segment.stop] = segment.ids[segment.start : segment.stop]
            segment.row.length = segment.stop

    def _score_rows(
        self, hidden: Tensor, segments: Sequence[Segment], requests: Sequence[ScoreRequest]
    ) -> list[ScoreTable]:
        if not requests:
            return []
        wanted = {request.session_id: request.num_rows for request in requests}
        rows: list[int] = []
        at = 0
        for segment in segments:
            at += segment.stop - segment.start
            count = wanted.get(segment.row.session_id or "", 0)
            rows.extend(range(at - count, at))
        if len(rows) < len(hidden):  # not hidden[rows]: see `KVStore.keep_features`
            hidden = hidden.index_select(0, torch.tensor(rows, device=hidden.device))
        logits = self._decoder.logits(hidden)[:, : self._head.vocab_size]
        return score_tables(logits, requests, id_map=self._head.id_map, with_logsumexp=self._head.with_logsumexp)
