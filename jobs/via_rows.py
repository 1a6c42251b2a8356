"""Which rows a mask search looks at: to search on, to choose by, and to judge the choice on, each of other prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serving.errors import ConfigError
from serving.types import Ids
from tuning.mask_finals import Rung
from tuning.mask_space import NUM_BLOCKS
from tuning.selfgen import Dialogue
from tuning.via import Cut, excerpts
from tuning.workloads import normalised

# Rows to search on are many prompts' for the price: short prompts, few rows of each answer, early in it.
_SEARCHED = Cut(length=16, reach=48)
_JUDGED = Cut(length=32, reach=96)
_BRIEF = 4  # the shortest one in so many prompts is short
LEAST_FINAL_ROWS = 4  # a quarter of them is one


@dataclass(frozen=True)
class RowCounts:
    """Positions: in each of the blocks to search on, in all rungs of the finals together, and held out."""

    block: int
    final: int
    held_out: int

    @property
    def rungs(self) -> tuple[Rung, Rung]:
        """Of the finals: many masks on a quarter of the rows, the best of them on the others as well."""
        return Rung(24, self.final // 4), Rung(6, self.final - self.final // 4)


@dataclass(frozen=True)
class Rows:
    """Excerpts of answers: blocks to search on, rungs of the finals, and what is held out. No prompt is in two."""

    blocks: list[list[Dialogue]]
    rungs: list[list[Dialogue]]
    held_out: list[Dialogue]


def rows_of(dialogues: Sequence[Dialogue], counts: RowCounts, *, decode: Callable[[Ids], str], seed: int) -> Rows:
    """Each prompt once, in the order of `dialogues`, first what is held out. Raises ConfigError where rows lack.

    Prompts whose texts differ in white space or case alone are one.
    """
    supply = iter({normalised(decode(dialogue.prompt_ids)): dialogue for dialogue in dialogues}.values())
    held_out = _all(excerpts(supply, _JUDGED, num_rows=counts.held_out, seed=seed), counts.held_out, "--held-out-rows")
    rungs = [
        _all(excerpts(supply, _JUDGED, num_rows=rung.num_rows, seed=seed), rung.num_rows, "--final-rows")
        for rung in counts.rungs
    ]
    short_first = iter(_short_first(list(supply)))
    blocks = [
        _all(excerpts(short_first, _SEARCHED, num_rows=counts.block, seed=seed + block), counts.block, "--rows")
        for block in range(NUM_BLOCKS)
    ]
    return Rows(blocks, rungs, held_out)


def _short_first(dialogues: list[Dialogue]) -> list[Dialogue]:
    """Those with a short prompt, then the others, each in the order they had."""
    lengths = sorted(len(dialogue.prompt_ids) for dialogue in dialogues)
    limit = lengths[len(lengths) // _BRIEF] if lengths else 0
    return sorted(dialogues, key=lambda dialogue: len(dialogue.prompt_ids) > limit)


def _all(taken: list[Dialogue], wanted: int, flag: str) -> list[Dialogue]:
    found = sum(len(dialogue.output_ids) for dialogue in taken)
    if found < wanted:
        raise ConfigError(
            f"{flag}: {wanted} positions are asked for and the answers have {found} left; "
            "add --data or --tokens, or lower the positions of one kind"
        )
    return taken
