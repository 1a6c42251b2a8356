"""Mask searches on costs that are known: what they ask, that they resume, and that guidance pays."""

import contextlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from serving.errors import ConfigError
from tuning.dimr import Agreement
from tuning.mask_log import History, MaskLog, MaskSearch, Plan
from tuning.mask_space import NUM_BLOCKS, Mask, Question, Space
from tuning.masks import ARMS

NUM_LAYERS, SIZE, BUDGET = 16, 5, 60
HARM = np.random.default_rng(3).random(NUM_LAYERS)


def cost(mask: Mask) -> float:
    """Mostly additive, but neighbours that go together hurt more."""
    pairs = sum(b - a == 1 for a, b in itertools.pairwise(mask))
    return float(sum(HARM[layer] for layer in mask)) + 0.4 * pairs


def plan(**fields: object) -> Plan:
    values = {"num_layers": NUM_LAYERS, "sizes": [SIZE], "budget": BUDGET, "seed": 1}
    return Plan(**values | fields)  # type: ignore[arg-type]


def run(search: MaskSearch, *, stop_after: int | None = None) -> list[Question]:
    asked: list[Question] = []
    while (question := search.ask()) is not None and len(asked) != stop_after:
        asked.append(question)
        search.tell(question, Agreement(cost(question.mask), 0.0, 1.0))
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


def test_what_is_judged_again_is_of_the_budget_and_on_another_block(tmp_path: Path) -> None:
    search = MaskSearch(plan(arms=("guided", "random")), MaskLog(tmp_path / "log.jsonl", "toy"))
    asked = run(search)
    guided, rand = search.histories
    assert guided.num_asked == rand.num_asked == BUDGET
    again = [question for question in asked if question.block]
    assert len(again) == (BUDGET - (NUM_LAYERS - 2)) * 2 // 3 // 4
    for place, question in enumerate(asked):
        assert question.block < NUM_BLOCKS
        if question.block:  # the blocks before it were asked first
            assert Question(question.mask, question.block - 1) in asked[:place]
    assert len(guided.masks) == BUDGET - (NUM_LAYERS - 2) - len(again)


def noisy(question: Question, seed: int) -> float:
    """What a few rows say: blocks differ, and a mask has its luck on each."""
    luck = np.random.default_rng((seed, question.block, *question.mask)).normal(0.0, 0.15)
    return cost(question.mask) * float(np.exp(luck)) * (1.0 + 0.3 * question.block)


def test_guidance_beats_chance_where_few_rows_mislead() -> None:
    """By the true cost of each arm's best three, as finals on many rows would choose among them."""
    space, found = Space(NUM_LAYERS, SIZE), {"guided": 0.0, "random": 0.0}
    for seed, arm in itertools.product(range(8), found):
        history = History(arm, space)
        asking = ARMS[arm](space, BUDGET, seed)
        question = next(asking)
        with contextlib.suppress(StopIteration):
            while True:
                history.take(question, noisy(question, seed))
                question = asking.send(noisy(question, seed))
        found[arm] += min(cost(mask) for mask in history.leaders(3)) / 8
    assert found["guided"] < 0.9 * found["random"]


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


def run_with_failures(search: MaskSearch, *, attempts: int) -> dict[Question, int]:
    """Every third question fails `attempts` times before it is judged; returns how often each was asked."""
    asked: dict[Question, int] = {}
    bad: set[Question] = set()
    while (question := search.ask()) is not None:
        if question not in asked and len(asked) % 3 == 2:
            bad.add(question)
        asked[question] = asked.get(question, 0) + 1
        if question in bad and asked[question] <= attempts:
            search.fail(question)
        else:
            search.tell(question, Agreement(cost(question.mask), 0.0, 1.0))
    return asked


def test_case_42_a_mask_that_fails_once_is_judged_at_the_second_try(tmp_path: Path) -> None:
    search = MaskSearch(plan(arms=("guided",)), MaskLog(tmp_path / "log.jsonl", "toy"))
    asked = run_with_failures(search, attempts=1)
    assert set(asked.values()) == {1, 2}
    whole = MaskSearch(plan(arms=("guided",)), MaskLog(tmp_path / "whole.jsonl", "toy"))
    run(whole)
    assert search.histories[0].costs == whole.histories[0].costs


def test_case_42_a_mask_that_fails_twice_has_no_cost_and_is_tried_again_by_a_later_run(tmp_path: Path) -> None:
    search = MaskSearch(plan(arms=("guided", "random")), MaskLog(tmp_path / "log.jsonl", "toy"))
    asked = run_with_failures(search, attempts=2)
    failed = {question for question, count in asked.items() if count == 2}
    assert failed
    for history in search.histories:
        assert np.isfinite(history.costs).all()
        assert not failed & {Question(mask) for mask in history.masks}
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()[1:]]
    assert {Question(tuple(line["skipped"]), line["block"]) for line in lines if line.get("failed")} == failed
    assert all("cost" not in line for line in lines if line.get("failed"))
    again = run(MaskSearch(plan(arms=("guided", "random")), MaskLog(tmp_path / "log.jsonl", "toy")))
    assert again[0] == next(question for question, count in asked.items() if count == 2)


def test_a_search_in_which_everything_fails_says_so_early(tmp_path: Path) -> None:
    search = MaskSearch(plan(arms=("random",)), MaskLog(tmp_path / "log.jsonl", "toy"))
    for _ in range(3):
        assert not search.is_hopeless
        for _ in range(2):
            question = search.ask()
            assert question is not None
            search.fail(question)
    assert search.is_hopeless
    assert search.histories[0].masks == []


def test_seconds_add_up_over_the_runs_of_a_search(tmp_path: Path) -> None:
    ticks = itertools.count(step=0.5)
    for stop_after, seconds in ((40, 20.0), (None, None)):
        log = MaskLog(tmp_path / "log.jsonl", "toy")
        run(MaskSearch(plan(), log, clock=lambda: next(ticks)), stop_after=stop_after)
        assert log.seconds == pytest.approx(seconds or 0.5 * log.num_evaluated)
    assert log.num_evaluated == len(log) > 40


def test_a_log_of_other_data_is_refused(tmp_path: Path) -> None:
    MaskLog(tmp_path / "log.jsonl", "toy")
    with pytest.raises(ConfigError, match="other data"):
        MaskLog(tmp_path / "log.jsonl", "other")


def test_even_masks_are_even() -> None:
    assert list(ARMS["even"](Space(11, 3), 1, 0)) == [Question((3, 5, 7))]
    assert list(ARMS["even"](Space(11, 6), 1, 0)) == [Question((1, 2, 4, 6, 8, 9))]


@pytest.mark.parametrize(
    "line",
    ["garbage", "[1, 2]", "3", '{"skipped": [1]}', '{"block": 0}', '{"skipped": 1, "block": 0}', "\xff"],
)
@pytest.mark.parametrize("number", [1, 3])
def test_a_damaged_line_is_named(tmp_path: Path, line: str, number: int) -> None:
    path = tmp_path / "log.jsonl"
    MaskLog(path, "toy").add(Question((1, 2)), Agreement(0.5, 0.1, 0.9), 1.0)
    lines = path.read_bytes().splitlines()
    lines.insert(number - 1, line.encode("latin-1"))
    path.write_bytes(b"\n".join([*lines, b""]))
    with pytest.raises(ConfigError, match=rf"log.jsonl, line {number}: is no line of a mask search .*; delete the"):
        MaskLog(path, "toy")


@pytest.mark.parametrize("num_layers", [3, 4, 6, 11, 30])
def test_even_masks_have_their_size_whatever_it_is(num_layers: int) -> None:
    for size in range(1, num_layers - 1):
        space = Space(num_layers, size)
        ((mask, _),) = ARMS["even"](space, 1, 0)
        assert len(set(mask)) == size
        assert set(mask) <= set(space.candidates)
        assert list(mask) == sorted(mask)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("size", [1, 4])
def test_the_least_budget_of_an_arm_tries_a_mask_of_each_size_and_less_is_refused(
    arm: str, size: int, tmp_path: Path
) -> None:
    least = NUM_LAYERS - 1 if arm in ("guided", "one at a time") else 1
    search = MaskSearch(plan(arms=(arm,), sizes=[size], budget=least), MaskLog(tmp_path / "log.jsonl", "toy"))
    assert len(run(search)) <= least
    assert len(search.histories[0].masks) > 0
    with pytest.raises(ConfigError, match=f"--budget: arm '{arm}' needs at least {least} on {NUM_LAYERS} layers"):
        plan(arms=(arm,), sizes=[size], budget=least - 1)
