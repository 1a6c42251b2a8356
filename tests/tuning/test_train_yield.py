"""The yield predictor learns what can be learnt, and is the same for the same seed."""

import numpy as np

from serving.drafters.yield_features import FEATURES
from serving.drafters.yield_predictor import YieldPredictor
from tuning.train_yield import YieldRecipe, train_yield
from tuning.yield_report import Accuracy, calibration, importance


def data(seed: int, count: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    """The yield is the score where the match is local, else 0."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, len(FEATURES))).astype(np.float32)
    rows[:, 0], rows[:, 5] = rng.integers(0, 16, count), rng.integers(0, 2, count)
    return rows, (rows[:, 0] * rows[:, 5]).astype(np.int32)


def trained(epochs: int = 12) -> YieldPredictor:
    return train_yield(*data(0), YieldRecipe(epochs=epochs, batch_size=128), on_epoch=lambda _, __: None)


def test_a_yield_that_features_determine_is_learnt(one_thread) -> None:
    rows, yields = data(1)
    predictor = trained()
    found = Accuracy.of(predictor.predict(rows), yields)
    assert found.mean_squared_error < 0.15 * found.variance
    assert min(found.precision, found.recall) > 0.85
    assert set(list(importance(predictor.predict, rows, yields))[:2]) == {"score", "is_local"}
    assert all(abs(said - true) < 1.5 for said, true in calibration(predictor.predict(rows), yields))


def test_the_same_seed_gives_the_same_predictor(one_thread) -> None:
    rows, _ = data(1, 50)
    np.testing.assert_array_equal(trained(2).predict(rows), trained(2).predict(rows))


def test_training_reports_falling_errors(one_thread) -> None:
    heard: list[tuple[int, float]] = []
    train_yield(*data(0), YieldRecipe(epochs=5), on_epoch=lambda *report: heard.append(report))
    assert [epoch for epoch, _ in heard] == [1, 2, 3, 4, 5]
    assert heard[-1][1] < heard[0][1]


def test_accuracy_by_hand() -> None:
    found = Accuracy.of(np.array([7.0, 6.0, 2.0, 1.0], dtype=np.float32), np.array([8, 2, 6, 0]))
    assert (found.num_drafts, found.share_long, found.precision, found.recall) == (4, 0.5, 0.5, 0.5)
