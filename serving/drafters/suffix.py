"""Drafts from text that was seen before: this request's own, and earlier responses of the same tenant."""

from collections.abc import Sequence

from serving.drafters.ready import ReadyDrafts
from serving.memory.lookup import SuffixMatch
from serving.memory.suffix import SuffixCache
from serving.protocols import DraftRequest, Outcome
from serving.types import EMPTY_DRAFT, Draft, Ids, common_prefix


class SuffixDrafter:
    """A suffix cache behind the Drafter protocol. Follows each request's ids by their difference to what it has."""

    degraded = False

    def __init__(self, cache: SuffixCache) -> None:
        self._cache = cache
        self._known: dict[str, tuple[Ids, int]] = {}

    @property
    def num_sessions(self) -> int:
        return len(self._known)

    def start(self, requests: Sequence[DraftRequest]) -> ReadyDrafts:
        return ReadyDrafts([self.draft(self._match(asked, asked.cache_limit), asked) for asked in requests])

    def matches(self, requests: Sequence[DraftRequest]) -> list[SuffixMatch]:
        """What the cache would say in each place, at its own full length whatever a request allows."""
        return [self._match(request, None) for request in requests]

    def draft(self, match: SuffixMatch, request: DraftRequest) -> Draft:
        """`match` as a draft, cut to what the request allows."""
        return Draft(match.ids, "suffix", match.probabilities).clipped(request.cache_limit) or EMPTY_DRAFT

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Committed ids arrive with the next start; acceptance itself teaches the cache nothing."""

    def close(self, session_id: str, ids: Ids | None) -> None:
        if session_id not in self._known:
            return
        known, prompt_len = self._known.pop(session_id)
        if ids is not None:
            self._follow(session_id, known, ids)
        self._cache.close(session_id, response_start=None if ids is None else prompt_len)

    def _match(self, request: DraftRequest, max_draft: int | None) -> SuffixMatch:
        if request.session_id in self._known:
            self._follow(request.session_id, self._known[request.session_id][0], request.ids)
        else:
            self._cache.open(request.session_id, request.ids, salt=request.salt)
        self._known[request.session_id] = (request.ids, request.prompt_len)
        return self._cache.speculate(request.session_id, max_draft)

    def _follow(self, session_id: str, known: Ids, ids: Ids) -> None:
        """Bring the local memory from `known` to `ids`; they differ only behind their common prefix."""
        common = common_prefix(known, ids)
        if common < len(known):
            self._cache.truncate(session_id, common)
        if common < len(ids):
            self._cache.append(session_id, ids[common:])
