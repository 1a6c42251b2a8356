"""Finals that are the same for every arm, and what is said of two masks on the same prompts."""

from pathlib import Path

import numpy as np
import pytest

from serving.models.hf_decoder import HFDecoder
from tests.models.test_packed_lm import make_lm
from tests.models.test_slim import deep
from tests.tuning.test_via import dialogue
from tuning.dimr import Agreement, mean
from tuning.mask_finals import Rung, difference, finals
from tuning.mask_log import History, MaskLog
from tuning.mask_space import Mask, Question, Space
from tuning.via import MaskBench, each_judged

pytestmark = pytest.mark.usefixtures("one_thread")

COSTS = {(1,): (0.1, 0.9, 0.9), (2,): (0.2, 0.5, 0.8), (3,): (0.3, 0.6, 0.4), (4,): (0.4, 0.1, 0.1)}
RUNGS = (Rung(3, 10), Rung(2, 30))


def history(arm: str, masks: list[Mask]) -> History:
    return History(arm, Space(6, 1), masks=masks, costs=[COSTS[mask][0] for mask in masks])


def test_the_best_of_each_rung_go_on_and_every_rows_counts(tmp_path: Path) -> None:
    log, asked = MaskLog(tmp_path / "finals.jsonl", "toy"), []

    def judge(question: Question) -> None:
        asked.append(question)
        log.add(question, Agreement(COSTS[question.mask][1 + question.block], 0.0, 1.0), 1.0)

    guided, lone = history("guided", [(4,), (3,), (2,), (1,)]), history("even", [(2,)])
    finals([guided, lone], RUNGS, log, judge)
    assert asked == [Question((1,)), Question((2,)), Question((3,)), Question((2,), 1), Question((3,), 1)]
    assert guided.final_costs == pytest.approx({(2,): (10 * 0.5 + 30 * 0.8) / 40, (3,): (10 * 0.6 + 30 * 0.4) / 40})
    assert (guided.best, lone.best) == ((3,), (2,))
    again = history("guided", [(4,), (3,), (2,), (1,)])
    finals([again], RUNGS, MaskLog(tmp_path / "finals.jsonl", "toy"), judge)
    assert len(asked) == 5  # all in the log
    assert again.final_costs == guided.final_costs


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("rung", [0, 1])
def test_a_mask_whose_cost_is_no_number_drops_out(tmp_path: Path, bad: float, rung: int) -> None:
    log = MaskLog(tmp_path / "finals.jsonl", "toy")

    def judge(question: Question) -> None:
        is_bad = (question.mask, question.block) == ((1,), rung)
        log.add(question, Agreement(bad if is_bad else 0.5 + question.mask[0], 0.0, 1.0), 1.0)

    guided, lone = history("guided", [(1,), (2,), (3,)]), history("even", [(1,)])
    assert finals([guided, lone], RUNGS, log, judge) == [guided]
    assert (guided.best, (1,) in guided.final_costs, lone.final_costs) == ((2,), False, {})


def test_a_mask_that_could_not_be_judged_drops_out(tmp_path: Path) -> None:
    log = MaskLog(tmp_path / "finals.jsonl", "toy")

    def judge(question: Question) -> None:
        if question.mask == (1,):
            log.add_failed(question, 1.0)
        else:
            log.add(question, Agreement(0.5, 0.0, 1.0), 1.0)

    guided = history("guided", [(1,), (2,)])
    assert finals([guided], RUNGS, log, judge) == [guided]
    assert list(guided.final_costs) == [(2,)]


def test_held_out_dialogues_are_judged_batch_by_batch_as_they_would_be_at_once() -> None:
    target, dialogues = make_lm(HFDecoder(deep())), [dialogue(seed, num_output=3 + seed % 3) for seed in range(18)]
    masks: list[Mask] = [(2,), (1, 4)]
    parts = list(each_judged(target, dialogues, masks))
    assert len(parts) == 2
    for mask in masks:
        found = [one for part in parts for one in part[mask]]
        assert [rows for rows, _ in found] == [len(one.output_ids) for one in dialogues]
        assert mean(found).cost == pytest.approx(MaskBench(target, dialogues).agreement(mask).cost, abs=1e-6)


def test_a_difference_is_paired_by_prompt() -> None:
    """Prompts differ much and masks little: only pairs tell the masks apart."""
    rng = np.random.default_rng(0)
    levels, rows = rng.uniform(0.1, 5.0, 60), rng.integers(8, 32, 60)
    one = [(int(n), Agreement(level, level, 0.5)) for n, level in zip(rows, levels, strict=True)]
    noise = rng.normal(0.1, 0.05, 60)
    other = [(n, Agreement(a.cost + e, a.kl + e, 0.5)) for (n, a), e in zip(one, noise, strict=True)]
    found = difference(one, other)
    assert found["cost"].value == pytest.approx(mean(one).cost - mean(other).cost, abs=1e-5)
    assert found["cost"].low is not None
    assert found["cost"].high is not None
    assert -0.13 < found["cost"].low < found["cost"].value < found["cost"].high < -0.07
    assert (found["top1"].low, found["top1"].high) == (0.0, 0.0)
