"""Suffix cache: continuations from what was said before, for the suffix and hybrid drafters.

SuffixDecoding (arXiv 2411.04975) as HVD (arXiv 2606.01019) uses it. For every match length m <= max_depth, in
the local memory (this prompt and output) and in the global one (the tenant's earlier responses), the greedy
path after the last m tokens is a candidate, of at most floor(m * factor + offset) tokens. The highest sum of
path probabilities wins; ties go to the longer match, then to the local memory.
"""

from collections import Counter, deque
from dataclasses import dataclass
from math import isfinite

import numpy.typing as npt

from serving.memory.lookup import MOST_DRAFTED, Lookup, LookupLimits, SuffixMatch, best_lookup
from serving.memory.occurrences import PathLimits
from serving.memory.suffix_global import TenantMemory, checked_ids
from serving.memory.suffix_local import LocalMemory
from serving.types import Ids


@dataclass(frozen=True, slots=True)
class _Request:
    salt: str
    memory: LocalMemory


class SuffixCache:
    """A local memory for each open request, a global memory for each tenant (salt).

    Not thread-safe: one engine thread owns it. Tenants never see each other's tokens; they share `max_tokens`
    and the oldest response leaves first. An approximation for short, very common contexts only: of more than
    `max_occurrences` places that match, the most recent count, and of more than 8 times as many that match
    the last 3 tokens (local memory: the last one), the most recent are examined for a longer match.
    Token ids must be in [0, 2_097_150). A method given an unknown request_id raises KeyError.
    """

    def __init__(
        self,
        *,
        max_depth: int = 64,
        max_draft: int = 64,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        max_tokens: int = 1_000_000,
        max_occurrences: int = 256,
        lookup: Lookup | None = None,
    ) -> None:
        _at_least(1, max_depth=max_depth, max_occurrences=max_occurrences)
        _at_least(0, max_tokens=max_tokens, factor=factor)
        _within(MOST_DRAFTED, max_draft=max_draft)
        _within(1, min_prob=min_prob)
        if not (isfinite(factor) and isfinite(offset)):
            raise ValueError(f"factor and offset must be finite, got {factor} and {offset}")
        path = PathLimits(max_draft=max_draft, factor=factor, offset=offset, min_prob=min_prob)
        self._whole = LookupLimits(path, max_depth, max_occurrences)
        self._limits = {max_draft: self._whole}
        self._max_draft = max_draft
        self._max_tokens = max_tokens
        self._lookup = lookup or best_lookup()
        self._requests: dict[str, _Request] = {}
        self._tenants: dict[str, TenantMemory] = {}
        self._ages: deque[str] = deque()  # the salt of every request in the global memory, oldest first
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in the global memory, all tenants together."""
        return self._num_tokens

    @property
    def num_responses(self) -> int:
        """Finished responses in the global memory."""
        return len(self._ages)

    @property
    def num_requests(self) -> int:
        """Open requests, each with a local memory."""
        return len(self._requests)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, global and local."""
        tenants = sum(tenant.nbytes for tenant in self._tenants.values())
        return tenants + sum(request.memory.nbytes for request in self._requests.values())

    def open(self, request_id: str, tokens: npt.ArrayLike, *, salt: str = "") -> None:
        """Start a local memory with the prompt (and any output so far), i[n]."""
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is already open")
        self._requests[request_id] = _Request(salt, LocalMemory(checked_ids(tokens)))

    def append(self, request_id: str, tokens: npt.ArrayLike) -> None:
        """Add emitted tokens i[n] to the local memory."""
        self._request(request_id).memory.append(checked_ids(tokens))

    def length(self, request_id: str) -> int:
        """Tokens in the local memory."""
        return self._request(request_id).memory.length

    def speculate(
        self, request_id: str, max_draft: int | None = None, *, tokens: Ids | None = None, place: bytes = b""
    ) -> SuffixMatch:
        """Best continuation of the request's tokens; `max_draft` may only lower the cache's own.

        `tokens` i32[n] is the request's whole text by now, which the local memory then holds. `place` is for a judge.
        """
        request = self._request(request_id)
        limits = self._whole if max_draft is None else self._limits_for(max_draft)
        return self._lookup.best(request.memory, self._tenants.get(request.salt), limits, tokens, place)

    def close(self, request_id: str, *, response_start: int | None, tokens: Ids | None = None) -> None:
        """Forget the local memory; unless `response_start` is None, tokens[response_start:] become global.

        `tokens` as in `speculate`.
        """
        request = self._request(request_id)
        if response_start is not None:
            if tokens is not None:
                request.memory.follow(checked_ids(tokens))
            _within(request.memory.length, response_start=response_start)
            self._insert(request.memory.ids_from(response_start), request.salt)
        del self._requests[request_id]

    def insert(self, tokens: npt.ArrayLike, *, salt: str = "") -> None:
        """Add a finished response i[n] to the tenant's global memory.

        Of one above max_tokens the end is kept; one of fewer than 2 tokens predicts nothing and is dropped.
        """
        self._insert(checked_ids(tokens), salt)

    def check_integrity(self) -> None:
        """Raise AssertionError naming what is broken. Takes time in proportion to the memory."""
        if Counter(self._ages) != {salt: tenant.num_responses for salt, tenant in self._tenants.items()}:
            raise AssertionError("the tenants' numbers of responses disagree with the order of eviction")
        for tenant in self._tenants.values():
            tenant.check_integrity()
        for request in self._requests.values():
            request.memory.check_integrity()
        total = sum(tenant.num_tokens for tenant in self._tenants.values())
        if total != self._num_tokens:
            raise AssertionError(f"num_tokens is {self._num_tokens}, the tenants hold {total}")
        if total > self._max_tokens:
            raise AssertionError(f"num_tokens {total} exceeds max_tokens {self._max_tokens}")

    def _request(self, request_id: str) -> _Request:
        try:
            return self._requests[request_id]
        except KeyError:
            raise KeyError(f"request_id {request_id!r} is not open") from None

    def _limits_for(self, max_draft: int) -> LookupLimits:
        """One object for each max_draft asked for: it holds tables."""
        if max_draft >= self._max_draft:
            return self._whole
        _at_least(0, max_draft=max_draft)
        if max_draft not in self._limits:
            self._limits[max_draft] = self._whole.tightened(max_draft)
        return self._limits[max_draft]

    def _insert(self, ids: Ids, salt: str) -> None:
        ids = ids[max(0, ids.size - self._max_tokens) :]
        if ids.size < 2:
            return
        while self._num_tokens + ids.size > self._max_tokens:
            self._evict_oldest()
        self._tenants.setdefault(salt, TenantMemory()).insert(ids)
        self._ages.append(salt)
        self._num_tokens += ids.size

    def _evict_oldest(self) -> None:
        salt = self._ages.popleft()
        tenant = self._tenants[salt]
        self._num_tokens -= tenant.evict_oldest()
        if not tenant.num_responses:
            del self._tenants[salt]


def _at_least(lowest: int, **values: float) -> None:
    for name, value in values.items():
        if not value >= lowest:
            raise ValueError(f"{name} must be at least {lowest}, got {value}")


def _within(highest: int, **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= highest:
            raise ValueError(f"{name} must be in [0, {highest}], got {value}")
