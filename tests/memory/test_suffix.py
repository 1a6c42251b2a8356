"""The suffix cache against its definition, counted out by hand."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import floor, fsum

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.memory.lookup import ArrayLookup, Lookup, NativeLookup, SuffixMatch, best_lookup
from serving.memory.occurrences import PathLimits, best_candidate
from serving.memory.suffix import SuffixCache
from serving.memory.suffix_global import ID_LIMIT, TenantMemory
from serving.types import as_ids


@dataclass(frozen=True)
class Options:
    max_depth: int = 64
    max_draft: int = 64
    factor: float = 1.0
    offset: float = 0.0
    min_prob: float = 0.1

    def cache(self, max_tokens: int = 1_000_000, lookup: Lookup | None = None) -> SuffixCache:
        return SuffixCache(
            lookup=lookup,
            max_depth=self.max_depth,
            max_draft=self.max_draft,
            factor=self.factor,
            offset=self.offset,
            min_prob=self.min_prob,
            max_tokens=max_tokens,
        )


@dataclass(frozen=True)
class Expected:
    ids: list[int]
    probabilities: list[float]
    match_length: int = 0
    is_local: bool = False

    @property
    def rank(self) -> tuple[float, int, bool]:
        return fsum(self.probabilities), self.match_length, self.is_local


def expected_path(
    sequences: list[list[int]], context: list[int], limit: int, min_prob: float
) -> Iterator[tuple[int, float]]:
    """The definition: walk to the child with the highest count, by dictionary counting."""
    length = len(context)
    found = [
        (sequence, end)
        for sequence in sequences
        for end in range(length, len(sequence))
        if sequence[end - length : end] == context
    ]
    probability = Fraction(1)
    for step in range(limit):
        counts = Counter(sequence[end + step] for sequence, end in found if end + step < len(sequence))
        if not counts:
            return
        best = min(counts, key=lambda token: (-counts[token], token))
        probability *= Fraction(counts[best], counts.total())
        if float(probability) < min_prob:
            return
        yield best, float(probability)
        found = [
            (sequence, end) for sequence, end in found if end + step < len(sequence) and sequence[end + step] == best
        ]


def expected_match(local: list[int], responses: list[list[int]], options: Options) -> Expected:
    candidates = [Expected([], [])]
    for is_local, sequences in ((True, [local]), (False, responses)):
        for length in range(1, min(options.max_depth, len(local)) + 1):
            limit = min(options.max_draft, floor(length * options.factor + options.offset))
            path = list(expected_path(sequences, local[-length:], limit, options.min_prob))
            if path:
                ids, probabilities = zip(*path, strict=True)
                candidates.append(Expected(list(ids), list(probabilities), length, is_local))
    return max(candidates, key=lambda candidate: candidate.rank)


def check(match: SuffixMatch, expected: Expected) -> None:
    assert match.ids.tolist() == expected.ids
    assert (match.match_length, match.is_local) == (expected.match_length, expected.is_local)
    assert match.score == fsum(expected.probabilities)
    np.testing.assert_allclose(match.probabilities, expected.probabilities, rtol=1e-6)
    assert match.ids.dtype == np.int32
    assert match.probabilities.dtype == np.float32
    assert len(match) == len(expected.ids)
    assert match.empty == (not expected.ids)


def row(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def sequences(max_size: int, num_ids: int = 3) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, num_ids - 1), max_size=max_size)


any_options = st.builds(
    Options,
    max_depth=st.sampled_from([1, 2, 3, 4, 64]),
    max_draft=st.sampled_from([0, 1, 3, 64]),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    offset=st.sampled_from([-1.0, 0.0, 2.0]),
    min_prob=st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 1.0]),
)
operations = st.one_of(
    st.tuples(st.just("append"), sequences(6)),
    st.tuples(st.just("follow"), st.tuples(st.integers(0, 12), sequences(6))),
    st.tuples(st.just("insert"), sequences(24)),
)


@pytest.fixture(scope="module", params=["arrays", "native"])
def lookup(request: pytest.FixtureRequest) -> Lookup:
    if request.param == "arrays":
        return ArrayLookup()
    found = best_lookup()
    assert isinstance(found, NativeLookup), "the test machine has no C++ compiler (g++)"
    return found


@settings(max_examples=120, deadline=None)
@given(any_options, sequences(24), st.lists(operations, max_size=10))
def test_speculate_equals_the_definition(lookup, options, prompt, steps):
    cache = options.cache(lookup=lookup)
    cache.open("r", np.array(prompt, dtype=np.int64))
    local, responses = list(prompt), []
    for kind, argument in [("append", []), *steps]:
        if kind == "append":
            cache.append("r", argument)
            local += argument
        elif kind == "follow":
            num_gone, added = argument
            local = local[: max(0, len(local) - num_gone)] + added
            check(cache.speculate("r", tokens=as_ids(local)), expected_match(local, responses, options))
        else:
            cache.insert(argument)
            responses.append(argument)
        check(cache.speculate("r"), expected_match(local, responses, options))
    cache.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), sequences(20)), max_size=25), sequences(20))
def test_eviction_forgets_the_oldest_response_of_any_tenant(lookup, inserted, prompt):
    options = Options()
    cache = options.cache(max_tokens=40, lookup=lookup)
    for salt in "ab":
        cache.open(salt, prompt, salt=salt)
    kept: list[tuple[str, list[int]]] = []
    for salt, tokens in inserted:
        cache.insert(tokens, salt=salt)
        if len(tokens) > 1:
            kept.append((salt, tokens))
        while sum(len(each) for _, each in kept) > 40:
            del kept[0]
        assert cache.num_tokens == sum(len(each) for _, each in kept)
        assert cache.num_responses == len(kept)
        cache.check_integrity()
    for salt in "ab":
        responses = [tokens for owner, tokens in kept if owner == salt]
        check(cache.speculate(salt), expected_match(list(prompt), responses, options))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(sequences(20).filter(lambda each: len(each) > 1), min_size=1, max_size=20),
    sequences(8).filter(bool),
    st.data(),
)
def test_segments_do_not_change_what_is_found(inserted, tail, data):
    limits = PathLimits(max_draft=64, factor=2.0, offset=0.0, min_prob=0.0)
    num_evicted = data.draw(st.integers(0, len(inserted) - 1))
    found = []
    for segment_tokens in (1, 24, 100_000):
        memory = TenantMemory(segment_tokens=segment_tokens)
        for tokens in inserted:
            memory.insert(row(*tokens))
        assert sum(memory.evict_oldest() for _ in range(num_evicted)) == sum(map(len, inserted[:num_evicted]))
        memory.check_integrity()
        levels = memory.levels(row(*reversed(tail)), max_occurrences=256)
        found.append(best_candidate(memory.tokens, levels, limits=limits, floor_score=0.0))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("options", "ids", "probabilities"),
    [
        (Options(), [4, 5, 6], [0.6, 0.6, 0.6]),
        (Options(max_draft=2), [4, 5], [0.6, 0.6]),
        (Options(max_draft=0), [], []),
        (Options(factor=0.0), [], []),
        (Options(factor=0.5, offset=0.5), [4, 5], [0.6, 0.6]),
        (Options(factor=0.5), [4], [0.6]),
        (Options(factor=2.0), [4, 5, 6, 7, 8], [0.6, 0.6, 0.6, 0.3, 0.3]),
        (Options(factor=2.0, min_prob=0.3), [4, 5, 6, 7, 8], [0.6, 0.6, 0.6, 0.3, 0.3]),
        (Options(factor=2.0, min_prob=0.31), [4, 5, 6], [0.6, 0.6, 0.6]),
        (Options(min_prob=0.7), [], []),
        (Options(max_depth=1), [4], [0.6]),
    ],
)
def test_limits_end_the_path(lookup, options, ids, probabilities):
    """After 1 2 3 comes 4 in three of five; the third 4 ends early and leaves the count; then 7 and 9 tie."""
    cache = options.cache(lookup=lookup)
    for tokens in ([4, 5, 6, 7, 8], [4, 5, 6, 9, 8], [4, 5], [10, 4], [11, 4]):
        cache.insert([1, 2, 3, *tokens])
    cache.open("r", [1, 2, 3])
    match = cache.speculate("r")
    assert match.ids.tolist() == ids
    np.testing.assert_allclose(match.probabilities, probabilities, rtol=1e-6)
    assert match.score == pytest.approx(sum(probabilities))
    assert not match.is_local


def test_a_longer_global_match_wins_where_max_draft_makes_scores_equal():
    cache = SuffixCache(max_draft=1)
    cache.insert([5, 5, 5, 6])
    cache.open("r", [5, 5, 5])
    match = cache.speculate("r")
    assert (match.ids.tolist(), match.match_length, match.is_local) == ([6], 3, False)


def test_a_growing_local_memory_loses_nothing(lookup):
    tokens = np.random.default_rng(0).integers(0, 20, 150).tolist()
    cache = SuffixCache(lookup=lookup)
    cache.open("r", [])
    for start in range(0, 150, 5):
        cache.append("r", tokens[start : start + 5])
        check(cache.speculate("r"), expected_match(tokens[: start + 5], [], Options()))
    cache.check_integrity()


def test_max_draft_of_a_call_only_lowers():
    cache = SuffixCache(max_draft=3)
    cache.open("r", [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4])
    assert cache.speculate("r").ids.tolist() == [5, 6, 7]
    assert cache.speculate("r", 2).ids.tolist() == [5, 6]
    assert cache.speculate("r", 50).ids.tolist() == [5, 6, 7]
    assert cache.speculate("r", 0).empty


@pytest.mark.parametrize(
    ("prompt", "responses", "ids", "match_length", "is_local"),
    [
        ([], [[1, 2, 3]], [], 0, False),
        ([9], [[1, 2, 3]], [], 0, False),
        ([2, 9], [[1, 2, 3]], [], 0, False),
        ([1, 2], [[1, 2, 3], [4, 5]], [3], 2, False),  # no path into the next response
        ([2, 3], [[1, 2], [3, 4]], [4], 1, False),  # no match across responses
        ([1, 2], [[1, 2], [3, 4]], [], 0, False),  # nothing follows within the response
        ([5, 7, 5], [[5, 6]], [7], 1, True),  # equal in score and length: local
        ([1, 5, 7, 2, 5], [[2, 5, 6]], [6], 2, False),  # equal in score: the longer match
        ([1, 1, 1, 1], [], [1, 1], 2, True),  # occurrences overlap; the one for 3 tokens ends after one
        ([7], [[7, 3], [7, 2], [7, 3], [7, 2]], [2], 1, False),  # equal counts: the lowest id
    ],
)
def test_which_candidate_wins(lookup, prompt, responses, ids, match_length, is_local):
    cache = SuffixCache(lookup=lookup)
    for response in responses:
        cache.insert(response)
    cache.open("r", prompt)
    match = cache.speculate("r")
    assert match.ids.tolist() == ids
    assert (match.match_length, match.is_local) == (match_length, is_local)


def test_case_29_a_tenant_never_drafts_another_tenants_text():
    odd = [731, 5, 988, 42, 6007, 13, 271, 902, 8, 404]
    cache = SuffixCache()
    cache.open("a", [1, 2, *odd], salt="A")
    cache.close("a", response_start=2)
    for request_id, salt in (("b", "B"), ("none", ""), ("again", "A")):
        cache.open(request_id, odd[:5], salt=salt)
    assert cache.speculate("b").empty
    assert cache.speculate("none").empty
    assert cache.speculate("again").ids.tolist() == odd[5:]


def test_close_remembers_the_response_and_not_the_prompt():
    cache = SuffixCache()
    cache.open("r", [1, 2, 3])
    cache.append("r", [4, 5, 6])
    cache.close("r", response_start=3)
    cache.open("dropped", [7, 8, 9, 10])
    cache.close("dropped", response_start=None)
    assert (cache.num_tokens, cache.num_responses, cache.num_requests) == (3, 1, 0)
    cache.open("prompt", [1, 2])
    assert cache.speculate("prompt").empty
    cache.open("response", [4, 5])
    assert cache.speculate("response").ids.tolist() == [6]
    cache.check_integrity()


def test_tokens_that_are_taken_back_are_forgotten():
    cache = SuffixCache()
    cache.open("r", [1, 2, 3, 4])
    cache.append("r", [1, 2])
    assert cache.speculate("r").ids.tolist() == [3, 4]
    assert cache.speculate("r", tokens=as_ids([1, 2])).empty
    assert cache.length("r") == 2
    cache.close("r", response_start=0)
    cache.open("next", [2])
    assert cache.speculate("next").empty
    cache.check_integrity()


def test_a_text_that_outgrows_its_room_is_followed(lookup):
    cache, text = SuffixCache(lookup=lookup), [*range(100), *range(40)]
    cache.open("r", text[:3])
    for length in range(3, len(text) + 1):
        match = cache.speculate("r", tokens=as_ids(text[:length]))
        assert cache.length("r") == length
        assert match.empty == (length <= 100)
    cache.check_integrity()
    assert match.ids.tolist() == list(range(40, 80))


def test_a_match_keeps_its_tokens():
    cache = SuffixCache()
    cache.open("r", [1, 2, 3, 4, 1, 2])
    match = cache.speculate("r")
    cache.speculate("r", tokens=as_ids([9] * 6))
    assert match.ids.tolist() == [3, 4]


def test_a_response_above_the_bound_keeps_its_end():
    cache = SuffixCache(max_tokens=4)
    cache.insert([1, 2, 3, 4, 5, 6])
    assert cache.num_tokens == 4
    cache.open("r", [3, 4])
    assert cache.speculate("r").ids.tolist() == [5, 6]


def test_no_global_memory_at_a_bound_of_zero():
    cache = SuffixCache(max_tokens=0)
    cache.insert([1, 2, 3])
    assert cache.num_tokens == 0
    cache.check_integrity()


@pytest.mark.parametrize("context", [[7], [6, 7], [5, 6, 7], [4, 5, 6, 7]])
def test_only_the_most_recent_of_very_many_occurrences_count(lookup, context):
    cache = SuffixCache(max_occurrences=4, lookup=lookup)
    for token in [1] * 10 + [2] * 3 + [3]:
        cache.insert([4, 5, 6, 7, token, 0])
    cache.open("r", context)
    match = cache.speculate("r")
    assert match.ids[0] == 2
    assert match.probabilities[0] == np.float32(0.75)


def test_a_rare_long_match_is_found_behind_a_common_short_one(lookup):
    cache = SuffixCache(max_occurrences=4, lookup=lookup)
    cache.insert([1, 2, 3, 4, 50, 51])
    for _ in range(20):
        cache.insert([9, 2, 3, 4, 60, 61])
    cache.open("r", [1, 2, 3, 4])
    assert cache.speculate("r").ids.tolist() == [50, 51]


def test_the_highest_token_id_is_matched(lookup):
    top = ID_LIMIT - 1
    cache = SuffixCache(lookup=lookup)
    cache.insert([top, top - 1, top, 3])
    cache.open("r", [top, top - 1, top])
    assert cache.speculate("r").ids.tolist() == [3]
    cache.check_integrity()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 12), st.booleans())
def test_both_lookups_find_the_same_in_longer_texts(seed, num_ids, tight):
    rng = np.random.default_rng(seed)
    caches = [SuffixCache(max_occurrences=8 if tight else 256, lookup=each) for each in (ArrayLookup(), best_lookup())]
    for _ in range(20):
        response = rng.integers(0, num_ids, rng.integers(2, 200))
        for cache in caches:
            cache.insert(response)
    prompt = rng.integers(0, num_ids, 100)
    for cache in caches:
        cache.open("r", prompt)
    for token in rng.integers(0, num_ids, 20).tolist():
        arrays, native = (cache.speculate("r") for cache in caches)
        assert arrays.ids.tolist() == native.ids.tolist()
        assert (arrays.score, arrays.match_length) == (native.score, native.match_length)
        assert (arrays.is_local, arrays.probabilities.tolist()) == (native.is_local, native.probabilities.tolist())
        for cache in caches:
            cache.append("r", [token])
