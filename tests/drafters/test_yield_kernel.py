"""The predictor in the loop: every way to run it says what the plain formula says."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from serving.compiling import load_library
from serving.drafters.chooser import Predictor
from serving.drafters.yield_features import FEATURES, feature_rows
from serving.drafters.yield_kernel import _SOURCE, ArrayYields, NativeYields
from serving.drafters.yield_predictor import YieldPredictor

Make = Callable[[YieldPredictor], Predictor]
SHIPPED = "smollm2-135m-yield"


def native(predictor: YieldPredictor) -> Predictor:
    library = load_library(_SOURCE, otherwise="these tests fail")
    assert library is not None, "the test machine has no C++ compiler (g++)"
    return NativeYields(predictor, library)


def plain_formula(predictor: YieldPredictor, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """In float64, layer by layer, nothing folded."""
    hidden = np.maximum((rows - predictor.mean) / predictor.std @ predictor.w1 + predictor.b1, 0.0)
    hidden = np.maximum(hidden @ predictor.w2 + predictor.b2, 0.0)
    return (hidden @ predictor.w3 + predictor.b3)[:, 0]


@pytest.mark.parametrize("make", [ArrayYields, native])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_batch_is_what_the_plain_formula_says(make: Make, count: int) -> None:
    predictor, rng = YieldPredictor.load(SHIPPED), np.random.default_rng(count)
    rows = feature_rows(predictor.mean + predictor.std * rng.normal(size=(count, len(FEATURES))))
    found = make(predictor).predict(rows.tolist())
    expected = plain_formula(predictor, rows.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)  # tokens; float32 leaves some 1e-6


@pytest.mark.parametrize("make", [ArrayYields, native])
def test_what_is_no_number_stays_none(make: Make) -> None:
    rows = [[float("nan")] * len(FEATURES), [1.0] * len(FEATURES)]
    found = make(YieldPredictor.load(SHIPPED)).predict(rows)
    assert np.isnan(found).tolist() == [True, False]


def test_a_row_has_the_same_bits_alone_and_in_a_batch_that_grows() -> None:
    yields, rng = native(YieldPredictor.load(SHIPPED)), np.random.default_rng(0)
    rows = rng.normal(size=(7, len(FEATURES))).tolist()
    alone = [yields.predict([row])[0] for row in rows]
    assert yields.predict(rows) == alone
    assert yields.predict(rows[:2]) == alone[:2]
