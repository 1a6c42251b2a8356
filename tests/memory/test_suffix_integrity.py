"""The suffix cache's memory: its size, what check_integrity names, and what is refused."""

from itertools import count

import numpy as np
import pytest

from serving.memory.suffix import SuffixCache
from serving.memory.suffix_global import ID_LIMIT, TenantMemory
from serving.types import as_ids


def test_200_000_random_tokens_take_less_than_32_bytes_each():
    rng = np.random.default_rng(0)
    cache = SuffixCache(max_tokens=200_000)
    while cache.num_tokens < 199_000:
        cache.insert(rng.integers(0, 50_000, rng.integers(100, 600)))
    assert cache.nbytes < 32 * cache.num_tokens
    cache.check_integrity()


def test_memory_shrinks_with_what_is_left():
    memory = TenantMemory()
    for start in range(0, 30_000, 30):
        memory.insert(np.arange(start, start + 30, dtype=np.int32))
    while memory.num_responses > 1:
        memory.evict_oldest()
        assert memory.nbytes < 64 * memory.num_tokens + 1024
    memory.check_integrity()


def filled() -> SuffixCache:
    cache = SuffixCache(max_tokens=100)
    for start in count(0, 7):
        if cache.num_tokens > 80:
            break
        cache.insert(np.arange(start, start + 7), salt="t")
    cache.open("r", [1, 2, 3])
    return cache


def unsort(cache: SuffixCache) -> None:
    cache._tenants["t"]._segments[0].keys[0] += 1 << 62


def move(cache: SuffixCache) -> None:
    offsets = cache._tenants["t"]._segments[0].offsets
    offsets[:2] = offsets[1::-1].copy()


def join(cache: SuffixCache) -> None:
    tokens = cache._tenants["t"]._array
    tokens[np.flatnonzero(tokens == -1)[1]] = 5


def miscount(cache: SuffixCache) -> None:
    cache._num_tokens += 1


def lose(cache: SuffixCache) -> None:
    cache._ages.pop()


def untile(cache: SuffixCache) -> None:
    del cache._tenants["t"]._segments[-1]


def outgrow(cache: SuffixCache) -> None:
    cache._max_tokens = 10


def cut(cache: SuffixCache) -> None:
    cache._requests["r"].memory._array[2] = -1


def uncap(cache: SuffixCache) -> None:
    cache._requests["r"].memory._array[4] = 7


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (unsort, "keys are not sorted"),
        (move, "keys and tokens disagree"),
        (join, "sentinels are not exactly around the responses"),
        (miscount, "num_tokens is 85, the tenants hold 84"),
        (lose, "disagree with the order of eviction"),
        (untile, "do not tile the tokens"),
        (outgrow, "num_tokens 84 exceeds max_tokens 10"),
        (cut, "sentinel inside the sequence"),
        (uncap, "sentinel missing at an end"),
    ],
)
def test_check_integrity_names_what_is_broken(corrupt, message):
    cache = filled()
    cache.check_integrity()
    corrupt(cache)
    with pytest.raises(AssertionError, match=message):
        cache.check_integrity()


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.append("x", [1]),
        lambda cache: cache.speculate("x"),
        lambda cache: cache.length("x"),
        lambda cache: cache.close("x", response_start=None),
    ],
)
def test_an_unknown_request_is_named(call):
    with pytest.raises(KeyError, match="request_id 'x' is not open"):
        call(filled())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.open("r", [1]), "request_id 'r' is already open"),
        (lambda cache: cache.speculate("r", tokens=as_ids([1, -1])), "tokens must be in"),
        (lambda cache: cache.speculate("r", tokens=as_ids([ID_LIMIT])), "tokens must be in"),
        (lambda cache: cache.close("r", response_start=0, tokens=as_ids([-1])), "tokens must be in"),
        (lambda cache: cache.close("r", response_start=4), r"response_start must be in \[0, 3\], got 4"),
        (lambda cache: cache.speculate("r", -1), "max_draft must be at least 0, got -1"),
        (lambda cache: cache.append("r", [-1]), "tokens must be in"),
        (lambda cache: cache.insert([0, ID_LIMIT]), "tokens must be in"),
        (lambda cache: cache.insert([0.5, 1.5]), "tokens must be a row of integers"),
        (lambda cache: cache.insert([[1, 2]]), "tokens must be a row of integers"),
        (lambda cache: SuffixCache(max_depth=0), "max_depth must be at least 1, got 0"),
        (lambda cache: SuffixCache(max_draft=257), r"max_draft must be in \[0, 256\], got 257"),
        (lambda cache: SuffixCache(factor=-1.0), "factor must be at least 0, got -1.0"),
        (lambda cache: SuffixCache(min_prob=1.5), r"min_prob must be in \[0, 1\], got 1.5"),
        (lambda cache: SuffixCache(offset=float("inf")), "factor and offset must be finite"),
    ],
)
def test_bad_arguments_are_named_and_change_nothing(call, message):
    cache = filled()
    with pytest.raises(ValueError, match=message):
        call(cache)
    cache.check_integrity()
    assert (cache.num_tokens, cache.num_requests, cache.length("r")) == (84, 1, 3)
