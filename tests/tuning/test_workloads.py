"""Edit prompts: the same for a seed, and really edits."""

from tuning.workloads import EditWorkload


def test_prompts_depend_on_the_seed_alone() -> None:
    assert EditWorkload(6, seed=1).prompts() == EditWorkload(6, seed=1).prompts()
    assert EditWorkload(6, seed=1).prompts()[:3] == EditWorkload(3, seed=1).prompts()
    assert EditWorkload(1, seed=1).prompts()[0].text != EditWorkload(1, seed=2).prompts()[0].text


def test_the_reference_is_the_text_with_a_small_change() -> None:
    for prompt in EditWorkload(10).prompts():
        given = prompt.text.partition("\n\n")[2].replace("```python\n", "").removesuffix("```")
        reference = str(prompt.reference)
        assert reference != given
        changed = sum(a != b for a, b in zip(given.split(), reference.split(), strict=True))
        assert 0 < changed < len(given.split()) / 4
