"""The hybrid drafter: the text is plain decoding's whoever is chosen, and who is chosen is what the chooser says."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.decode.offline import Completion, complete
from serving.drafters.chooser import Choice, Chooser, RuleChooser, YieldChooser
from serving.drafters.hybrid import HybridDrafter
from serving.drafters.suffix import SuffixDrafter
from serving.drafters.token_kinds import token_kinds
from serving.drafters.yield_features import History, Position, feature_rows, features
from serving.memory.lookup import SuffixMatch
from serving.memory.suffix import SuffixCache
from serving.protocols import DraftRequest, Outcome
from serving.types import EMPTY_DRAFT, Draft, DraftLimits, Floats, as_ids
from tests.decode.scripted import ScriptedDrafter, ScriptedModel, make_scheduler, oracle, plain, request

KINDS = token_kinds(chr(number) for number in range(32, 128))
SESSION = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]  # the cache goes on with 5, 6, 7, 8


def looping(ids: Sequence[int]) -> int:
    """A text that repeats itself with changes: the cache is right for a while, then wrong."""
    return 3 + (len(ids) % 7 if len(ids) % 23 else int(ids[-1]) % 50)


class Says:
    """A predictor of whatever `answer` makes of the features."""

    def __init__(self, answer: Callable[[Floats], Floats]) -> None:
        self.answer, self.num_rows = answer, 0

    def predict(self, choices: Sequence[Choice]) -> list[float]:
        self.num_rows += len(choices)
        rows = [features(one.match, one.position, one.history, KINDS) for one in choices]
        return self.answer(feature_rows(rows)).tolist()


def constant(value: float) -> Says:
    return Says(lambda rows: np.full(len(rows), value, dtype=np.float32))


def hybrid(model: ScriptedDrafter, chooser: Chooser, *, max_draft: int = 8) -> HybridDrafter:
    return HybridDrafter(SuffixDrafter(SuffixCache(max_draft=max_draft)), model, chooser, model_max_draft=4)


def ask(drafter: HybridDrafter, max_draft: int = 8, limits: DraftLimits | None = None) -> Draft:
    asked = DraftRequest("a", as_ids(SESSION), 9, max_draft, max_by_source=limits)
    (draft,) = drafter.start([asked]).result()
    return draft


def fixed_model() -> ScriptedDrafter:
    return ScriptedDrafter(lambda asked: [90] * asked.max_draft)


def generate(drafter: HybridDrafter, num_requests: int = 3) -> list[Completion]:
    scheduler = make_scheduler(ScriptedModel(looping), drafter, max_draft=8)
    return list(complete(scheduler, [request(f"r{i}", max_tokens=70) for i in range(num_requests)]))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["random", "constant", "nan", "inf", "adversarial", "mixed"]),
    st.floats(allow_nan=False) | st.just("measured"),
    st.integers(0, 3),
    st.integers(0, 2**32),
)
def test_output_is_plain_for_any_predictor(
    kind: str, threshold: float | Literal["measured"], right: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    answers: dict[str, Callable[[Floats], Floats]] = {
        "random": lambda rows: rng.normal(4, 8, len(rows)).astype(np.float32),
        "constant": lambda rows: np.full(len(rows), 5, dtype=np.float32),
        "nan": lambda rows: np.full(len(rows), np.nan, dtype=np.float32),
        "inf": lambda rows: np.full(len(rows), -np.inf, dtype=np.float32),
        "adversarial": lambda rows: -rows[:, 0],
        "mixed": lambda rows: np.where(rng.random(len(rows)) < 0.5, np.nan, 1e30).astype(np.float32),
    }
    drafter = hybrid(oracle(looping, right=right), YieldChooser(Says(answers[kind]), threshold))
    for done in generate(drafter):
        assert done.output_ids == plain(looping, (5, 9), 70)
        assert set(done.receipt.choices) <= {"suffix", "model"}
        assert sum(done.receipt.choices.values()) == done.receipt.rounds - done.receipt.drafts_empty


@pytest.mark.parametrize("predicted", [0.0, 7.0, 1e9, np.nan])
def test_infinite_thresholds_are_model_only_and_cache_only(predicted: float) -> None:
    model_only = hybrid(fixed_model(), YieldChooser(constant(predicted), np.inf))
    cache_only = hybrid(fixed_model(), YieldChooser(constant(predicted), -np.inf))
    assert ask(model_only).ids.tolist() == [90] * 4
    assert ask(cache_only).ids.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("predicted", "threshold", "source"),
    [
        (3.0, 2.5, "suffix"),
        (2.5, 2.5, "model"),
        (1e9, 4.0, "model"),  # clamped to the draft's four tokens
        (1e9, 3.9, "suffix"),
        (-1e9, -0.1, "suffix"),  # clamped to 0
        (np.nan, 3.9, "suffix"),  # the score, 4, stands in
        (np.nan, 4.0, "model"),
        (np.inf, 3.9, "suffix"),
    ],
)
def test_the_clamped_yield_is_compared_with_the_threshold(predicted: float, threshold: float, source: str) -> None:
    assert ask(hybrid(fixed_model(), YieldChooser(constant(predicted), threshold))).source == source


@pytest.mark.parametrize(("least_score", "source"), [(4.0, "suffix"), (4.1, "model")])
def test_the_rule_hybrid_goes_by_the_score(least_score: float, source: str) -> None:
    assert ask(hybrid(fixed_model(), RuleChooser(least_score))).source == source


def test_where_the_cache_finds_nothing_the_model_drafts_and_nothing_is_predicted() -> None:
    predictor = constant(9.0)
    drafter = hybrid(fixed_model(), YieldChooser(predictor, 0.0))
    (draft,) = drafter.start([DraftRequest("a", as_ids([1, 2, 3]), 2, 8)]).result()
    assert draft.source == "model"
    assert predictor.num_rows == 0


def test_the_model_is_asked_once_for_the_sessions_that_need_it_and_not_for_the_others() -> None:
    asked: list[list[str]] = []

    class Counting(ScriptedDrafter):
        def start(self, requests: Sequence[DraftRequest]):  # type: ignore[no-untyped-def]
            asked.append([one.session_id for one in requests])
            return super().start(requests)

    drafter = hybrid(Counting(lambda one: [90]), RuleChooser(4.0))
    requests = [DraftRequest("new", as_ids([1, 2]), 2, 8), DraftRequest("old", as_ids(SESSION), 9, 8)]
    drafts = drafter.start([*requests, DraftRequest("other", as_ids([7, 8]), 2, 8)]).result()
    assert [draft.source for draft in drafts] == ["model", "suffix", "model"]
    assert asked == [["new", "other"]]
    drafter.start(requests[1:]).result()
    assert len(asked) == 1


def test_a_short_round_cuts_the_draft_and_not_the_judgement() -> None:
    chooser = YieldChooser(Says(lambda rows: rows[:, 2]), 3.5)  # the length itself
    draft = ask(hybrid(fixed_model(), chooser), max_draft=2)
    assert (draft.source, draft.ids.tolist()) == ("suffix", [5, 6])


@pytest.mark.parametrize(
    ("limits", "threshold", "expected"),
    [
        (DraftLimits(cache=3, model=2), -1.0, [5, 6, 7]),
        (DraftLimits(cache=3, model=2), 99.0, [90, 90]),
        (DraftLimits(cache=3, model=0), 99.0, [5, 6, 7]),  # no model: the cache's, whatever it promises
        (DraftLimits(cache=0, model=2), -1.0, [90, 90]),  # no cache: the model's
    ],
)
def test_each_source_has_a_limit_of_its_own(limits: DraftLimits, threshold: float, expected: list[int]) -> None:
    drafter = hybrid(fixed_model(), YieldChooser(constant(0.0), threshold))
    assert ask(drafter, limits=limits).ids.tolist() == expected


@pytest.mark.parametrize(
    ("limits", "predicted", "source"),
    [
        (DraftLimits(4, 4, model_rate=1.2, row_price=0.05), 0.45, "suffix"),  # 1.2 * (1 + 4 * 0.05) - 1 = 0.44
        (DraftLimits(4, 4, model_rate=1.2, row_price=0.05), 0.43, "model"),
        (DraftLimits(2, 4, model_rate=1.2, row_price=0.05), 0.33, "suffix"),  # two rows are scored
        (DraftLimits(2, 4, model_rate=1.2, row_price=0.05), 0.31, "model"),
        (DraftLimits(2, 4, model_rate=3.5), 4.0, "model"),  # and no more than two can be kept
        (DraftLimits(4, 4, model_rate=0.5, row_price=0.05), 0.19, "model"),  # plain decoding is faster than the model
        (DraftLimits(4, 4, model_rate=0.5, row_price=0.05), 0.21, "suffix"),
        (DraftLimits(4, 0, model_rate=1.0, row_price=9.0), 0.0, "suffix"),  # no model: whatever it promises
        (DraftLimits(4, 4), 0.01, "suffix"),
        (DraftLimits(4, 4), 0.0, "model"),
        (DraftLimits(4, 4, model_rate=4.9), np.nan, "suffix"),  # the score, 4, stands in
        (DraftLimits(4, 4, model_rate=5.1), np.nan, "model"),
    ],
)
def test_a_measured_threshold_is_what_the_model_would_emit_in_the_same_time(
    limits: DraftLimits, predicted: float, source: str
) -> None:
    drafter = hybrid(fixed_model(), YieldChooser(constant(predicted), "measured"))
    assert ask(drafter, limits=limits).source == source


def test_history_is_kept_for_each_session_and_forgotten_with_it() -> None:
    seen: list[Floats] = []
    drafter = hybrid(fixed_model(), YieldChooser(Says(lambda rows: seen.append(rows) or rows[:, 0]), 0.0))  # type: ignore[func-returns-value]
    draft = ask(drafter)
    drafter.observe([Outcome("a", draft, 3), Outcome("b", EMPTY_DRAFT, 0)])
    ask(drafter)
    drafter.close("a", None)
    ask(drafter)
    recent = [rows[0, 9] for rows in seen]
    assert recent == [0.0, 3.0, 0.0]


def match(ids: list[int], score: float) -> SuffixMatch:
    return SuffixMatch.of(ids, score, 3, np.ones(len(ids)), is_local=True)


@given(st.lists(st.tuples(st.integers(1, 20), st.floats(allow_nan=True, allow_infinity=True, width=32)), max_size=6))
def test_yields_are_within_the_draft(drafts: list[tuple[int, float]]) -> None:
    choices = [Choice("a", match([9] * size, size / 2), Position(4, 2), History()) for size, _ in drafts]
    chooser = YieldChooser(Says(lambda _: np.array([value for _, value in drafts], dtype=np.float32)), 6.0)
    for found, (size, _) in zip(chooser.yields(choices), drafts, strict=True):
        assert 0.0 <= found <= size
