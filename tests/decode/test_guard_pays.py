"""Whether a drafter that pays is used and one that does not costs nothing, on a clock that only work moves.

Times are in tokens of plain decoding: a pass of one row takes 1. Drafters read what they missed before they draft.
"""

import random
from dataclasses import dataclass, field

import pytest

from serving.decode.costs import CostModel
from serving.decode.guard import ALLOWANCE, CREDIT, Guard
from serving.decode.source_guard import SourceGuard
from serving.types import EMPTY_DRAFT, Draft, DraftLimits, as_ids

ROW = 0.05
COSTS = {1: 1.0, 2: 1.0 + ROW, 8: 1.0 + 7 * ROW, 64: 1.0 + 63 * ROW}
PASSES = CostModel(COSTS)
PAYING = (0.39, 0.35, 0.30, 0.28)
MOST_OWED = 4.0  # tokens that the fund of readings may be in debt


@dataclass(frozen=True)
class Text:
    """A request: tokens of its prompt and of its answer, and the chance of each draft token once the others held."""

    prompt: int = 60
    answer: int = 96
    chances: tuple[float, ...] = PAYING


@dataclass
class Machine:
    """One session at a time. `step` and `position` are what drafting a token and reading one takes."""

    guard: Guard
    seed: int
    step: float = 0.133
    position: float = 0.015
    seconds: float = 0.0
    tokens: int = 0
    drafts: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    @property
    def ratio(self) -> float:
        """Time by that of plain decoding."""
        return self.seconds / self.tokens

    def serve(self, name: str, text: Text) -> int:
        """Answer one request; returns how often it was drafted for."""
        left, read, drafts = text.answer, 0, 0
        while left > 0:
            length = text.prompt + text.answer - left
            k = self.guard.limit(name, 1, length)
            draft, draft_s = EMPTY_DRAFT, 0.0
            if k:
                draft, drafts = Draft(as_ids([7] * k), "eagle3", num_passes=k), drafts + 1
                draft_s = self.step * k + self.position * max(0, length - read - 2)  # a step's own are in its price
                read = length
            left -= self._round(name, draft, draft_s, k, text, left)
        self.guard.forget(name)
        self.drafts += drafts
        return drafts

    def _round(self, name: str, draft: Draft, draft_s: float, k: int, text: Text, left: int) -> int:
        self.guard.record_drafts({name: draft} if k else {}, draft_s)
        verify_s = PASSES.seconds(1 + len(draft))
        self.guard.record_pass(rows=1 + len(draft), verify_s=verify_s)
        kept = accepted(self.rng, text.chances, min(len(draft), left - 1))
        if k:
            self.guard.observe(name, 1, draft, kept)
        self.seconds += draft_s + verify_s
        self.tokens += 1 + kept
        return 1 + kept


def accepted(rng: random.Random, chances: tuple[float, ...], most: int) -> int:
    """Leading draft tokens that hold."""
    return next((i for i in range(most) if rng.random() >= chances[i]), most)


def make_guard(token_s: float = 0.133, max_draft: int = 4) -> Guard:
    return Guard(CostModel(COSTS), max_draft=max_draft, token_s=token_s)


@pytest.mark.parametrize("token_s", [0.133, 0.0])
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_head_that_is_right_for_four_tokens_in_ten_pays(seed: int, token_s: float) -> None:
    machine = Machine(make_guard(token_s), seed)
    for number in range(60):
        machine.serve(str(number), Text())
    assert machine.ratio < 0.93


def test_bad_luck_does_not_put_a_drafter_off_that_pays_on_the_whole() -> None:
    machine = Machine(make_guard(), seed=9)
    for number in range(60):
        machine.serve(str(number), Text())
    asked = machine.drafts / (machine.tokens / 1.39)
    assert asked > 0.9


@pytest.mark.parametrize("seed", [1, 2])
def test_missed_rounds_do_not_make_the_next_trial_dearer(seed: int) -> None:
    """One session whose text turns from hopeless to predictable: it is found out however long it was left off."""
    machine = Machine(make_guard(), seed, position=0.02)
    for number in range(20):
        machine.serve(f"good {number}", Text(answer=200))
    before, tokens = machine.seconds, machine.tokens
    machine.serve("late", Text(answer=150, chances=(0.0,) * 4))
    machine.serve("later", Text(answer=400))
    assert (machine.seconds - before) / (machine.tokens - tokens) < 1.0


@pytest.mark.parametrize("prompt", [60, 500])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_worthless_drafter_costs_a_fiftieth_and_a_constant(seed: int, prompt: int) -> None:
    machine = Machine(make_guard(), seed)
    for number in range(100):
        machine.serve(str(number), Text(prompt=prompt, chances=(0.02, 0.0, 0.0, 0.0)))
    one_reading = prompt * machine.position
    assert machine.seconds <= (1.0 + ALLOWANCE) * machine.tokens + CREDIT + MOST_OWED + one_reading + 1.0


def test_long_prompts_that_gain_nothing_do_not_keep_short_ones_from_being_read() -> None:
    machine = Machine(make_guard(), seed=5)
    drafts = []
    for number in range(60):
        machine.serve(f"long {number}", Text(prompt=500, answer=16, chances=(0.0,) * 4))
        drafts.append(machine.serve(f"short {number}", Text()))
    assert sum(count >= 10 for count in drafts) >= 50
    assert machine.ratio < 1.0


def test_a_drafter_that_hangs_once_is_taken_up_again() -> None:
    machine = Machine(make_guard(), seed=6)
    for number in range(10):
        machine.serve(f"before {number}", Text())
    machine.position = 200.0 / 60  # two seconds of a remote drafter's time-out
    machine.serve("stalled", Text(answer=2))
    machine.position = 0.015
    drafts = [machine.serve(f"after {number}", Text()) for number in range(20)]
    assert sum(count >= 10 for count in drafts) >= 14


def test_what_is_too_doubtful_to_be_drafted_is_charged_to_its_session() -> None:
    """Passes that end without a token are no reading: the session's account runs dry, and others are still read."""
    guard = make_guard()
    asked = 0
    for length in range(60, 260):
        k = guard.limit("doubtful", 1, length)
        asked += k > 0
        guard.record_drafts({"doubtful": Draft(num_passes=1)} if k else {}, 0.133 if k else 0.0)
        if k:
            guard.observe("doubtful", 1, Draft(num_passes=1), 0)
    assert asked <= (CREDIT + 200 * ALLOWANCE) / 0.133 + 2
    assert any(guard.limit("other", 1, length) for length in range(60, 80))


def test_who_reads_for_ever_is_left_off_and_others_are_still_read() -> None:
    """No draft ever comes, and every round of asking takes time."""
    machine = Machine(make_guard(), seed=7)
    machine.serve("first", Text(answer=200))
    asked = 0
    for length in range(60, 260):
        k = machine.guard.limit("endless", 1, length)
        asked += k > 0
        machine.guard.record_drafts({"endless": EMPTY_DRAFT} if k else {}, 1.0 if k else 0.0)
        if k:
            machine.guard.observe("endless", 1, EMPTY_DRAFT, 0)
    assert asked <= 10
    assert machine.serve("other", Text(answer=200)) >= 20


@dataclass
class Hybrid:
    """A session that alternates between a cache that is right in `every` so many rounds, and the paying head."""

    guard: SourceGuard
    every: int
    rng: random.Random
    seconds: float = 0.0
    tokens: int = 0
    model_drafts: int = 0

    def serve(self, name: str, answer: int) -> None:
        length, end, read, turn = 60, 60 + answer, 0, 0
        while length < end:
            turn += 1
            limits = self.guard.limits(name, 1, length)
            draft, draft_s, chances = self._draft(limits, turn, length, read)
            read = length if draft.source == "eagle3" else read
            self.guard.record_drafts({name: draft} if limits.most else {}, draft_s)
            verify_s = PASSES.seconds(1 + len(draft))
            self.guard.record_pass(rows=1 + len(draft), verify_s=verify_s)
            kept = accepted(self.rng, chances, len(draft))
            if limits.most:
                self.guard.observe(name, 1, draft, kept)
            self.seconds += draft_s + verify_s
            self.tokens += 1 + kept
            length += 1 + kept
        self.guard.forget(name)

    def _draft(self, limits: DraftLimits, turn: int, length: int, read: int) -> tuple[Draft, float, tuple[float, ...]]:
        if turn % self.every == 0 and limits.cache:
            return Draft(as_ids([7] * limits.cache), "suffix"), 0.001, (0.95,) * limits.cache
        if not limits.model:
            return EMPTY_DRAFT, 0.001, ()
        self.model_drafts += 1
        seconds = 0.001 + 0.133 * limits.model + 0.015 * max(0, length - read - 2)
        return Draft(as_ids([7] * limits.model), "eagle3", num_passes=limits.model), seconds, PAYING


@pytest.mark.parametrize("every", [3, 4])  # at 2 catching up costs what this head gains
def test_a_model_goes_on_where_cache_rounds_come_between_its_drafts(every: int) -> None:
    guard = SourceGuard(cache=Guard(CostModel(COSTS), max_draft=16), model=make_guard())
    hybrid = Hybrid(guard, every, random.Random(8))
    for number in range(40):
        hybrid.serve(str(number), 200)
    assert hybrid.model_drafts >= 0.6 * (1 - 1 / every) * hybrid.tokens / (1.39 + 9 / every)
