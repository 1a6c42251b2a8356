"""Mask searches on costs that are known: what they ask, that they resume, and that guidance pays."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from serving.errors import ConfigError
from tuning.dimr import Agreement
from tuning.mask_log import History, MaskLog, MaskSearch, Plan
from tuning.masks import ARMS, Mask, Space

NUM_LAYERS, SIZE, BUDGET = 16, 5, 60
HARM = np.random.default_rng(3).random(NUM_LAYERS)


def cost(mask: Mask) -> float:
    """Mostly additive, but neighbours that go together hurt more."""
    pairs = sum(b - a == 1 for a, b in itertools.pairwise(mask))
    return float(sum(HARM[layer] for layer in mask)) + 0.4 * pairs


def plan(**fields: object) -> Plan:
    values = {"num_layers": NUM_LAYERS, "sizes": [SIZE], "budget": BUDGET, "seed": 1}
    return Plan(**values | fields)  # type: ignore[arg-type]


def run(search: MaskSearch, *, stop_after: int | None = None) -> list[Mask]:
    asked: list[Mask] = []
    while (mask := search.ask()) is not None and len(asked) != stop_after:
        asked.append(mask)
        search.tell(mask, Agreement(cost(mask), 0.0, 1.0))
    return asked


@pytest.fixture
def histories(tmp_path: Path) -> dict[str, History]:
    search = MaskSearch(plan(), MaskLog(tmp_path / "log.jsonl", "toy"))
    run(search)
    return {history.arm: history for history in search.histories}


def test_every_mask_has_its_size_and_keeps_first_and_last_layer(histories: dict[str, History]) -> None:
    assert list(histories) == list(ARMS)
    for history in histories.values():
        for mask in history.masks:
            assert len(set(mask)) == SIZE
            assert 0 < min(mask) <= max(mask) < NUM_LAYERS - 1
            assert list(mask) == sorted(mask)


def test_no_arm_exceeds_the_budget(histories: dict[str, History]) -> None:
    sensitivities = NUM_LAYERS - 2
    assert len(histories["random"].masks) == len(histories["alternating"].masks) == BUDGET
    assert len(histories["guided"].masks) <= BUDGET - sensitivities
    assert len(histories["even"].masks) == len(histories["one at a time"].masks) == 1


def test_guidance_beats_chance_and_what_is_best_alone(histories: dict[str, History]) -> None:
    least = {arm: min(history.costs) for arm, history in histories.items()}
    assert least["guided"] < min(least["random"], least["one at a time"], least["even"])
    assert histories["guided"].running_best[-1] == least["guided"] == cost(histories["guided"].best)


def test_case_38_a_killed_search_goes_on_and_asks_nothing_twice(tmp_path: Path) -> None:
    whole = MaskSearch(plan(), MaskLog(tmp_path / "whole.jsonl", "toy"))
    expected = run(whole)
    first = run(MaskSearch(plan(), MaskLog(tmp_path / "cut.jsonl", "toy")), stop_after=40)
    with (tmp_path / "cut.jsonl").open("a") as file:
        file.write('{"skipped": [1, 2')  # killed while it wrote
    again = MaskSearch(plan(), MaskLog(tmp_path / "cut.jsonl", "toy"))
    assert first + run(again) == expected
    assert [history.masks for history in again.histories] == [history.masks for history in whole.histories]
    assert len(set(expected)) == len(expected)


def test_case_39_a_larger_budget_goes_on_and_never_gets_worse(tmp_path: Path) -> None:
    small = MaskSearch(plan(arms=("random",)), MaskLog(tmp_path / "log.jsonl", "toy"))
    run(small)
    large = MaskSearch(plan(arms=("random",), budget=90), MaskLog(tmp_path / "log.jsonl", "toy"))
    asked = run(large)
    assert large.histories[0].masks[:BUDGET] == small.histories[0].masks
    assert len(asked) <= 30
    assert min(large.histories[0].costs) <= min(small.histories[0].costs)


def test_case_42_a_mask_that_fails_is_never_the_best(tmp_path: Path) -> None:
    search = MaskSearch(plan(arms=("guided",)), MaskLog(tmp_path / "log.jsonl", "toy"))
    number = 0
    while (mask := search.ask()) is not None:
        number += 1
        search.tell(mask, Agreement(float("inf") if number % 3 == 0 else cost(mask), 0.0, 1.0))
    assert np.isfinite(min(search.histories[0].costs))
    again = MaskLog(tmp_path / "log.jsonl", "toy")
    assert len(again) == number


def test_a_log_of_other_data_is_refused(tmp_path: Path) -> None:
    MaskLog(tmp_path / "log.jsonl", "toy")
    with pytest.raises(ConfigError, match="other data"):
        MaskLog(tmp_path / "log.jsonl", "other")


def test_even_masks_are_even() -> None:
    assert list(ARMS["even"](Space(11, 3), 1, 0)) == [(3, 5, 7)]
