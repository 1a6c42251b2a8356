"""The swaps of the guided search: what a model of layers foretells, and leaders that were only lucky."""

import itertools

import numpy as np

from tuning.mask_space import Mask, Question, Space
from tuning.swaps import swapped

SPACE = Space(12, 3)
HARM = np.linspace(0.1, 1.2, 12)
LUCKY: Mask = (8, 9, 10)  # the worst there is, and the best by the rows of block 0


def cost(question: Question) -> float:
    true = float(np.exp(sum(HARM[layer] for layer in question.mask))) * (1.0 + 0.5 * question.block)
    return 0.5 * float(np.exp(HARM[1:4].sum())) if question == Question(LUCKY) else true


def ask(answers: dict[Question, float], budget: int) -> list[Question]:
    asked: list[Question] = []
    asking = swapped(SPACE, answers, budget)
    question = next(asking, None)
    while question is not None:
        asked.append(question)
        try:
            question = asking.send(cost(question))
        except StopIteration:
            question = None
    return asked


def start() -> dict[Question, float]:
    masks = itertools.islice(itertools.combinations(SPACE.candidates, 3), 0, None, 9)
    return {Question(mask): cost(Question(mask)) for mask in (*masks, LUCKY)}


def test_the_swap_that_layers_foretell_is_asked_first() -> None:
    answers = {question: known for question, known in start().items() if question.mask not in (LUCKY, (1, 2, 3))}
    best = min(answers, key=answers.__getitem__)
    first = ask(dict(answers), 1)[0]
    assert len(set(first.mask) & set(best.mask)) == 2
    assert cost(first) < answers[best]


def test_a_leader_by_luck_is_judged_again_and_leads_no_more() -> None:
    """The other blocks are harder for every mask, which must not be held against those that were judged there."""
    answers = start()
    asked = ask(answers, 24)
    assert [question.block > 0 for question in asked] == [number % 4 == 0 for number in range(1, 25)]
    again = [question for question in asked if question.block]
    assert again[0] == Question(LUCKY, 1)
    assert [question.mask for question in again[2:]].count(LUCKY) == 0
    assert (1, 2, 3) in {question.mask for question in again[1:]}


def test_a_mask_that_could_not_be_judged_is_nobodys_parent() -> None:
    answers = {Question((1, 2, 3)): float("inf"), Question((8, 9, 10)): 5.0}
    (first,) = ask(answers, 1)
    assert len(set(first.mask) & {8, 9, 10}) == 2
    assert ask({Question((1, 2, 3)): float("inf")}, 5) == []
