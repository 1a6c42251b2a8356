"""From many masks judged on few rows to a choice, and what the choice is worth on prompts that had no part in it."""

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
) -> None:
    """Successive halving, the same for every arm: fills `final_costs` of each history with those of the last rung.

    `judge` answers a question, whose block is the rung, by adding to `log`; it is asked what the log lacks. A cost is
    the mean over the rows of all rungs so far.
    """
    for number, rung in enumerate(rungs):
        staying = [history.leaders(rung.num_masks) for history in histories]
        for mask in dict.fromkeys(mask for masks in staying for mask in masks):
            if log.get(Question(mask, number)) is None:
                judge(Question(mask, number))
        for history, masks in zip(histories, staying, strict=True):
            history.final_costs = {mask: _cost(mask, rungs[: number + 1], log) for mask in masks}


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
    found = []
    for number, rung in enumerate(rungs):
        agreement = log.get(Question(mask, number))
        assert agreement is not None, "judged on every rung so far"
        found.append((rung.num_rows, agreement))
    return mean(found).cost
