"""Workloads: the same for a seed, really edits, and never a test prompt in training."""

import pytest

from tuning.workloads import KINDS, Kind, Workload, split_of


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_depend_on_the_seed_alone(kind: Kind) -> None:
    prompts = Workload(kind, 12, seed=1).prompts()
    assert prompts == Workload(kind, 12, seed=1).prompts()
    assert prompts[:5] == Workload(kind, 5, seed=1).prompts()
    assert prompts[0].text != Workload(kind, 1, seed=2).prompts()[0].text
    assert len({prompt.text for prompt in prompts}) == len({prompt.id for prompt in prompts}) == 12


def test_the_reference_is_the_text_with_a_small_change() -> None:
    for prompt in Workload("edits", 10).prompts():
        given = prompt.text.partition("\n\n")[2].replace("```python\n", "").removesuffix("```")
        reference = str(prompt.reference)
        assert reference != given
        changed = sum(a != b for a, b in zip(given.split(), reference.split(), strict=True))
        assert 0 < changed < len(given.split()) / 4


def test_a_request_of_one_split_is_never_in_the_other() -> None:
    train = {split_of(p.text) for seed in range(3) for p in Workload("mixed", 20, seed=seed, split="train").prompts()}
    test = {split_of(p.text) for seed in range(3) for p in Workload("mixed", 20, seed=seed, split="test").prompts()}
    assert (train, test) == ({"train"}, {"test"})


def test_white_space_and_case_do_not_move_a_text_to_the_other_split() -> None:
    assert split_of("Copy  this\nText") == split_of("copy this text ")


def test_half_of_a_mixed_workload_is_chat() -> None:
    tasks = [prompt.task for prompt in Workload("mixed", 16).prompts()]
    assert tasks.count("chat") == 8
    assert set(tasks) == {"chat", "edit-text", "edit-code", "tool-calls", "revision"}
