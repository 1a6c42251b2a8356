"""From many masks judged on few rows to a choice, and what the choice is worth on prompts that had no part in it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuning.bootstrap import Interval, ratio
from tuning.dimr import ByDialogue, mean
from tuning.mask_log import History, MaskLog
from tuning.mask_space import Mask, Question

MEASURES = ("cost", "kl", "top1")


@dataclass(frozen=True)
class Rung:
    """The `num_masks` best masks of each arm are judged on `num_rows` rows of their own."""

    num_masks: int
    num_rows: int


def finals(
    histories: Sequence[History], rungs: Sequence[Rung], log: MaskLog, judge: Callable[[Question], None]
) -> list[History]:
    """Successive halving, the same for every arm: fills `final_costs` of each history with those of the last rung.

    `judge` answers a question, whose block is the rung, by adding to `log`; it is asked what the log lacks. A cost is
    the mean over the rows of all rungs so far. A mask without a finite one drops out; returned are the histories that
    have masks left.
    """
    staying = list(histories)
    for number, rung in enumerate(rungs):
        leaders = [history.leaders(rung.num_masks) for history in staying]
        for mask in dict.fromkeys(mask for masks in leaders for mask in masks):
            if log.get(Question(mask, number)) is None:
                judge(Question(mask, number))
        for history, masks in zip(staying, leaders, strict=True):
            costs = {mask: _cost(mask, rungs[: number + 1], log) for mask in masks}
            history.final_costs = {mask: cost for mask, cost in costs.items() if math.isfinite(cost)}
        staying = [history for history in staying if history.final_costs]
    return staying


def difference(one: ByDialogue, other: ByDialogue) -> dict[str, Interval]:
    """`one` less `other` on the same dialogues by measure: means over rows, with their 95 % intervals over prompts."""
    rows = [count for count, _ in one]
    found = {}
    for name in MEASURES:
        parts = [
            count * (getattr(mine, name) - getattr(its, name))
            for (count, mine), (_, its) in zip(one, other, strict=True)
        ]
        interval = ratio(parts, rows)
        assert interval is not None, "dialogues have rows"
        found[name] = interval
    return found


def _cost(mask: Mask, rungs: Sequence[Rung], log: MaskLog) -> float:
    """Infinite for one that could not be judged."""
    found = [(rung.num_rows, log.get(Question(mask, number))) for number, rung in enumerate(rungs)]
    judged = [(num_rows, agreement) for num_rows, agreement in found if agreement is not None]
    return mean(judged).cost if len(judged) == len(rungs) else math.inf
