"""The predictor in the loop: every way to run it says what the plain formula says of the features."""

import gc
from collections.abc import Callable
from ctypes import CDLL

import numpy as np
import numpy.typing as npt
import pytest

from serving.compiling import load_library
from serving.drafters.chooser import Choice, Predictor
from serving.drafters.yield_features import History, Position, feature_rows, features, packed_place
from serving.drafters.yield_kernel import _SOURCE, ArrayYields, NativeYields
from serving.drafters.yield_predictor import YieldPredictor, widened
from serving.memory.lookup import SuffixMatch, best_lookup
from serving.memory.suffix import SuffixCache
from serving.types import Ids

Make = Callable[[YieldPredictor], Predictor]
SHIPPED = "smollm2-135m-yield"
KINDS = np.array([*np.random.default_rng(0).integers(0, 16, 90), 0], dtype=np.uint8)


def native(predictor: YieldPredictor) -> Predictor:
    return NativeYields(predictor, KINDS, _library())


def _library() -> CDLL:
    library = load_library(_SOURCE, otherwise="these tests fail")
    assert library is not None, "the test machine has no C++ compiler (g++)"
    return library


def by_arrays(predictor: YieldPredictor) -> Predictor:
    return ArrayYields(predictor, KINDS)


def drawn(rng: np.random.Generator) -> Choice:
    """A draft of 1 to 64 tokens, some of which the tokenizer does not have."""
    size = int(rng.integers(1, 65))
    probabilities = np.sort(rng.random(size)).astype(np.float32)[::-1]
    match = SuffixMatch.of(
        rng.integers(0, 100, size), float(probabilities.sum()), int(rng.integers(1, 65)), probabilities,
        is_local=bool(rng.integers(2)),
    )  # fmt: skip
    history = History()
    for _ in range(rng.integers(6)):
        history.add(int(rng.integers(20)), is_cache=bool(rng.integers(2)))
    return Choice("a", match, Position(int(rng.integers(1, 900)), int(rng.integers(900))), history)


def plain_formula(predictor: YieldPredictor, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """In float64, layer by layer, nothing folded."""
    hidden = np.maximum((rows - predictor.mean) / predictor.std @ predictor.w1 + predictor.b1, 0.0)
    hidden = np.maximum(hidden @ widened(predictor.second_weights) + predictor.b2, 0.0)
    return (hidden @ predictor.w3 + predictor.b3)[:, 0]


@pytest.mark.parametrize("make", [by_arrays, native])
@pytest.mark.parametrize("count", [1, 2, 9, 40])
def test_a_batch_is_what_the_plain_formula_says(make: Make, count: int) -> None:
    predictor, rng = YieldPredictor.load(SHIPPED), np.random.default_rng(count)
    choices = [drawn(rng) for _ in range(count)]
    rows = feature_rows([features(one.match, one.position, one.history, KINDS) for one in choices])
    expected = plain_formula(predictor, rows.astype(np.float64))
    np.testing.assert_allclose(make(predictor).predict(choices), expected, rtol=1e-5, atol=1e-4)  # tokens, in float32


@pytest.mark.parametrize("make", [by_arrays, native])
def test_every_feature_counts_as_it_does_in_training(make: Make) -> None:
    """A network that hands one feature through after another says what `features` does."""
    found, choice = [], drawn(np.random.default_rng(1))
    expected = features(choice.match, choice.position, choice.history, KINDS)
    size, one = len(expected), np.eye(8, dtype=np.float32)
    for index in range(size):
        first = np.zeros((size, 8), dtype=np.float32)
        first[index, 0] = 1.0
        none = np.zeros(8, dtype=np.float32)
        predictor = YieldPredictor(
            mean=np.zeros(size, np.float32), std=np.ones(size, np.float32), w1=first, b1=none, w2=one, b2=none,
            w3=one[:, :1], b3=none[:1],
        )  # fmt: skip
        found += make(predictor).predict([choice])
    np.testing.assert_array_equal(found, np.array(expected, dtype=np.float32))


@pytest.mark.parametrize("make", [by_arrays, native])
def test_what_is_no_number_stays_none(make: Make) -> None:
    some = drawn(np.random.default_rng(0))
    match = some.match
    none = some._replace(match=SuffixMatch.of(match.ids, float("nan"), 3, match.probabilities, is_local=False))
    assert np.isnan(make(YieldPredictor.load(SHIPPED)).predict([none, some])).tolist() == [True, False]


def test_a_draft_has_the_same_bits_alone_and_in_a_batch_that_grows() -> None:
    yields, rng = native(YieldPredictor.load(SHIPPED)), np.random.default_rng(0)
    choices = [drawn(rng) for _ in range(7)]
    alone = [yields.predict([one])[0] for one in choices]
    assert yields.predict(choices) == alone
    assert yields.predict(choices[:2]) == alone[:2]


def test_a_look_up_that_asks_it_says_what_it_says_by_itself() -> None:
    yields, history = native(YieldPredictor.load(SHIPPED)), History()
    assert isinstance(yields, NativeYields)
    history.add(3, is_cache=True)
    caches = [SuffixCache(lookup=best_lookup(judge)) for judge in (yields.judge, None)]
    rng = np.random.default_rng(0)
    found = 0
    for length in range(2, 80):
        text, position = rng.integers(0, 4, length).astype(np.int32), Position(2, length - 2)
        asked, other = (match_of(cache, text, packed_place(position, history)) for cache in caches)
        assert asked.ids.tolist() == other.ids.tolist()
        assert np.isnan(other.predicted)
        if asked.empty:
            assert np.isnan(asked.predicted)
            continue
        found += 1
        assert yields.predict([Choice("a", asked, position, history)]) == [asked.predicted]
        assert yields.predict([Choice("a", other, position, history)]) == [asked.predicted]
    assert found > 50


def test_a_judge_in_a_look_up_outlives_who_made_it() -> None:
    judged = SuffixCache(lookup=best_lookup(NativeYields(YieldPredictor.load(SHIPPED), KINDS, _library()).judge))
    gc.collect()
    place = packed_place(Position(2, 5), History())
    assert match_of(judged, np.array([1, 2, 3, 4, 1, 2, 3], dtype=np.int32), place).predicted < np.inf


def match_of(cache: SuffixCache, text: Ids, place: bytes) -> SuffixMatch:
    cache.open("a", text)
    match = cache.speculate("a", place=place)
    cache.close("a", response_start=None)
    return match
