"""The rows of a mask search: many prompts, each for one purpose."""

import itertools

import numpy as np
import pytest

from jobs.via_rows import RowCounts, rows_of
from serving.errors import ConfigError
from serving.types import Ids, as_ids
from tuning.mask_space import NUM_BLOCKS
from tuning.selfgen import Dialogue

COUNTS = RowCounts(block=64, final=256, held_out=128)


def dialogues(count: int) -> list[Dialogue]:
    """Every other prompt is long; each begins with its number."""
    return [Dialogue(as_ids([number] + [7] * (20 + 80 * (number % 2))), as_ids(range(120))) for number in range(count)]


def spelled(ids: Ids) -> str:
    return " ".join(f"t{token}" for token in ids)


def prompts(parts: list[Dialogue]) -> set[int]:
    return {int(part.prompt_ids[0]) for part in parts}


def num_rows(parts: list[Dialogue]) -> int:
    return sum(len(part.output_ids) for part in parts)


def test_no_prompt_serves_twice_and_rows_are_of_many_prompts() -> None:
    texts = dialogues(100)
    rows = rows_of([*texts, *texts], COUNTS, decode=spelled, seed=0)
    groups = [*rows.blocks, *rows.rungs, rows.held_out]
    for one, other in itertools.combinations(groups, 2):
        assert not prompts(one) & prompts(other)
    assert [num_rows(block) for block in rows.blocks] == [64] * NUM_BLOCKS
    assert [len(block) for block in rows.blocks] == [4] * NUM_BLOCKS  # 16 rows of each
    assert [num_rows(rung) for rung in rows.rungs] == [64, 192]
    assert num_rows(rows.held_out) == 128
    assert [rung.num_rows for rung in COUNTS.rungs] == [64, 192]


def test_prompts_that_differ_in_white_space_or_case_alone_are_one() -> None:
    texts = {1: "What is a whale?", 2: " what is\n a WHALE? ", 3: "What is a shark?"}
    answers = [Dialogue(as_ids([number]), as_ids(range(32))) for number in texts]
    with pytest.raises(ConfigError, match=r"--final-rows: 1 positions .* have 0 left"):
        rows_of(answers[:2], RowCounts(1, 4, 32), decode=lambda ids: texts[int(ids[0])], seed=0)
    with pytest.raises(ConfigError, match=r"--final-rows: 3 positions .* have 0 left"):
        rows_of(answers, RowCounts(1, 4, 32), decode=lambda ids: texts[int(ids[0])], seed=0)


def test_searches_read_short_prompts_and_judgements_any() -> None:
    rows = rows_of(dialogues(100), COUNTS, decode=spelled, seed=0)
    assert all(prompt % 2 == 0 for block in rows.blocks for prompt in prompts(block))
    assert {prompt % 2 for prompt in prompts(rows.held_out)} == {0, 1}


def test_rows_are_the_same_for_the_same_seed() -> None:
    def ids() -> list[bytes]:
        rows = rows_of(dialogues(60), COUNTS, decode=spelled, seed=3)
        return [one.ids.tobytes() for block in (*rows.blocks, *rows.rungs, rows.held_out) for one in block]

    assert ids() == ids()


@pytest.mark.parametrize(
    ("counts", "flag"),
    [
        (RowCounts(4000, 64, 64), "--rows: 4000"),
        (RowCounts(64, 40000, 64), "--final-rows: 10000"),
        (RowCounts(64, 64, 40000), "--held-out-rows: 40000"),
    ],
)
def test_too_few_answers_are_said_by_the_flag_that_lacks_them(counts: RowCounts, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        rows_of(dialogues(60), counts, decode=spelled, seed=0)


def test_answers_may_be_short() -> None:
    texts = [Dialogue(as_ids([number, 7]), as_ids(np.arange(1 + number % 9))) for number in range(400)]
    rows = rows_of(texts, COUNTS, decode=spelled, seed=0)
    assert [num_rows(block) for block in rows.blocks] == [64] * NUM_BLOCKS
