"""Features of a cache draft, and the predictor that reads them."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.drafters.token_kinds import Kind, kind_of, token_kinds
from serving.drafters.yield_features import FEATURES, History, Position, feature_rows, features
from serving.drafters.yield_predictor import YieldPredictor
from serving.errors import ConfigError
from serving.memory.lookup import SuffixMatch


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("word", Kind(0)),
        (" ", Kind.WHITESPACE),
        ("\n", Kind.WHITESPACE | Kind.DELIMITER),
        (" (", Kind.PUNCTUATION | Kind.BRACKET),
        (",", Kind.PUNCTUATION | Kind.DELIMITER),
        ("):", Kind.PUNCTUATION | Kind.BRACKET | Kind.DELIMITER),
        ("f(x", Kind.BRACKET),
        ("", Kind(0)),
    ],
)
def test_the_kind_of_a_token(text: str, kind: Kind) -> None:
    assert kind_of(text) == kind


def named(match: SuffixMatch, position: Position, history: History) -> dict[str, float]:
    kinds = token_kinds(["a", " ", ",", "(", "b"])
    return dict(zip(FEATURES, features(match, position, history, kinds), strict=True))


def test_every_feature_by_name() -> None:
    history = History()
    for accepted, is_cache in ((4, True), (2, False), (6, True)):
        history.add(accepted, is_cache=is_cache)
    match = SuffixMatch.of([0, 1, 3, 999], 3.0, 7, [1, 1, 0.5, 0.5], is_local=False)
    found = named(match, Position(30, 10), history)
    assert {name: round(value, 4) for name, value in found.items()} == {
        "score": 3.0, "match_length": 7, "draft_length": 4, "mean_probability": 0.75, "last_probability": 0.5,
        "is_local": 0.0, "prompt_length": 30, "generated_length": 10, "relative_position": 0.25,
        "accepted_1_ago": 6, "accepted_2_ago": 2, "accepted_3_ago": 4,
        "accepted_average": 2.032, "cache_accepted_average": 1.84, "cache_rate": 0.5455,
        "whitespace_share": 0.25, "whitespace_first": 0.25, "punctuation_share": 0.25, "punctuation_first": 0.5,
        "bracket_share": 0.25, "bracket_first": 0.5, "delimiter_share": 0.0, "delimiter_first": 1.0,
    }  # fmt: skip


@given(st.lists(st.integers(0, 40), min_size=1, max_size=64), st.binary(max_size=30))
def test_structure_is_what_counting_says(ids: list[int], flags: bytes) -> None:
    kinds = np.array([*flags, 0], dtype=np.uint8)
    match = SuffixMatch.of(ids, 1.0, 1, np.ones(len(ids)), is_local=True)
    expected: list[float] = []
    for kind in Kind:
        places = [place for place, token in enumerate(ids) if token < len(flags) and flags[token] & kind]
        expected += (len(places) / len(ids), places[0] / len(ids)) if places else (0.0, 1.0)
    assert features(match, Position(3, 1), History(), kinds)[-len(expected) :] == expected


def predictor(seed: int = 0) -> YieldPredictor:
    rng = np.random.default_rng(seed)
    shapes = {"w1": (len(FEATURES), 8), "b1": (8,), "w2": (8, 8), "b2": (8,), "w3": (8, 1), "b3": (1,)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    ones = np.ones(len(FEATURES), dtype=np.float32)
    return YieldPredictor(mean=ones, std=2 * ones, **weights)


def test_a_predictor_is_the_same_after_it_was_stored(tmp_path) -> None:
    rows = feature_rows([np.arange(len(FEATURES)), np.ones(len(FEATURES))])
    predictor().save(tmp_path / "p", {"note": "a test"})
    loaded = YieldPredictor.load(str(tmp_path / "p"))
    np.testing.assert_array_equal(loaded.predict(rows), predictor().predict(rows))
    assert json.loads((tmp_path / "p" / "predictor.json").read_text())["note"] == "a test"


def test_a_row_is_predicted_alike_alone_and_in_a_batch() -> None:
    rows = feature_rows(np.random.default_rng(0).normal(size=(5, len(FEATURES))))
    alone = np.concatenate([predictor().predict(row[None]) for row in rows])
    np.testing.assert_allclose(predictor().predict(rows), alone, rtol=1e-4, atol=1e-5)


def test_what_is_no_predictor_is_refused_in_one_line(tmp_path) -> None:
    with pytest.raises(ConfigError, match="holds no yield predictor"):
        YieldPredictor.load(str(tmp_path))
    predictor().save(tmp_path, {})
    (tmp_path / "predictor.json").write_text('{"features": ["other"]}')
    with pytest.raises(ConfigError, match="trained on other features"):
        YieldPredictor.load(str(tmp_path))
