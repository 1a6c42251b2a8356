"""Drafts from text that was seen before: this request's own, and earlier responses of the same tenant."""

from collections.abc import Sequence

from serving.drafters.ready import ReadyDrafts
from serving.memory.lookup import SuffixMatch
from serving.memory.suffix import SuffixCache
from serving.protocols import DraftRequest, Outcome
from serving.types import EMPTY_DRAFT, Draft, Ids


class SuffixDrafter:
    """A suffix cache behind the Drafter protocol."""

    degraded = False

    def __init__(self, cache: SuffixCache) -> None:
        self._cache = cache
        self._prompt_lens: dict[str, int] = {}

    @property
    def num_sessions(self) -> int:
        return len(self._prompt_lens)

    def start(self, requests: Sequence[DraftRequest]) -> ReadyDrafts:
        return ReadyDrafts([self.draft(self._match(asked, asked.cache_limit), asked) for asked in requests])

    def match(self, request: DraftRequest, place: bytes) -> SuffixMatch:
        """What the cache would say, at its own full length whatever the request allows; `place` is for its judge."""
        return self._match(request, None, place)

    def draft(self, match: SuffixMatch, request: DraftRequest) -> Draft:
        """`match` as a draft, cut to what the request allows."""
        return Draft(match.ids, "suffix", match.probabilities).clipped(request.cache_limit) or EMPTY_DRAFT

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Committed ids arrive with the next start; acceptance itself teaches the cache nothing."""

    def close(self, session_id: str, ids: Ids | None) -> None:
        if session_id not in self._prompt_lens:
            return
        prompt_len = self._prompt_lens.pop(session_id)
        self._cache.close(session_id, response_start=None if ids is None else prompt_len, tokens=ids)

    def _match(self, request: DraftRequest, max_draft: int | None, place: bytes = b"") -> SuffixMatch:
        if request.session_id in self._prompt_lens:
            return self._cache.speculate(request.session_id, max_draft, tokens=request.ids, place=place)
        self._cache.open(request.session_id, request.ids, salt=request.salt)
        self._prompt_lens[request.session_id] = request.prompt_len
        return self._cache.speculate(request.session_id, max_draft, place=place)
