"""Speed by triples: when to stop, what is kept, and that every side does the same work from the same state."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest

from jobs.audit_report import markdown
from jobs.audit_speed import FixedWork, Triples, fixed_work_s, read_ahead, rotated, speed_report
from jobs.audited import AuditRuns
from serving.build import Built
from serving.config import load_profile
from serving.decode.limits import SchedulerLimits
from serving.drafters.suffix import SuffixDrafter
from serving.errors import ConfigError, DrafthouseError
from serving.memory.suffix import SuffixCache
from serving.requests import GenerationRequest
from serving.types import Ids, as_ids
from tests.decode.scripted import ScriptedModel, arithmetic, make_scheduler, oracle, plain, request
from tuning.audit_speed import Triple, speed_numbers
from tuning.bootstrap import LEAST_SAMPLES, Interval
from tuning.prompts import Prompt

STEADY = (1.0, 1.01, 0.99, 1.0, 1.01, 0.99)
NOISY = (1.0, 1.6, 0.7, 1.3, 0.8, 1.1)


def triple(candidate: str, number: int, *, second_s: float = 1.0, candidate_s: float = 0.8) -> Triple:
    return Triple(
        key="k", candidate=candidate, number=number, prompt_ids=("a",), num_tokens=32, strict_s=(1.0, second_s),
        candidate_s=candidate_s, took_s=4.0,
    )  # fmt: skip


@dataclass
class Machine:
    """Answers for the engine: how long strict's second side takes, by candidate, over and over."""

    second_s: dict[str, Sequence[float]]
    took_s: dict[str, float] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)

    def measure(self, candidate: str, number: int) -> Triple:
        self.asked.append((candidate, number))
        found = self.second_s[candidate]
        made = triple(candidate, number, second_s=found[number % len(found)])
        return made.model_copy(update={"took_s": self.took_s.get(candidate, 4.0)})

    def triples(self, path: Path, *, minutes: float) -> Triples:
        return Triples(list(self.second_s), minutes, path, "k", self.measure)


def test_each_candidate_in_turn_until_strict_agrees_with_itself(tmp_path: Path) -> None:
    machine = Machine({"plain": STEADY, "mine": NOISY, "yours": STEADY})
    triples = machine.triples(tmp_path / "t.jsonl", minutes=2.0)
    found = list(triples)
    assert machine.asked[:4] == [("plain", 0), ("mine", 0), ("yours", 0), ("plain", 1)]
    done = {name: [one for one in found if one.candidate == name] for name in machine.second_s}
    assert {name: speed_numbers(one).protocol_met for name, one in done.items()} == {
        "plain": True, "mine": False, "yours": True,
    }  # fmt: skip
    assert len(done["plain"]) == len(done["yours"]) == LEAST_SAMPLES
    assert sum(one.took_s for one in found) == 120.0  # the noisy one took what was left of the time
    assert [one.number for one in done["mine"]] == list(range(18))


def test_it_ends_as_soon_as_all_are_done(tmp_path: Path) -> None:
    machine = Machine({"plain": STEADY, "mine": STEADY})
    assert len(list(machine.triples(tmp_path / "t.jsonl", minutes=60.0))) == 2 * LEAST_SAMPLES


def test_every_candidate_has_its_turn_even_where_the_time_is_too_short_for_all(tmp_path: Path) -> None:
    machine = Machine({"plain": NOISY, "mine": NOISY, "yours": NOISY})
    assert len(list(machine.triples(tmp_path / "t.jsonl", minutes=0.05))) == 3
    assert machine.asked == [("plain", 0), ("mine", 0), ("yours", 0)]


def test_no_second_triple_is_begun_that_would_not_end_in_time(tmp_path: Path) -> None:
    slow = Machine({"plain": NOISY, "mine": NOISY}, took_s={"mine": 9.0})
    found = list(slow.triples(tmp_path / "t.jsonl", minutes=35 / 60))
    assert [one.candidate for one in found] == ["plain", "mine"] * 2 + ["plain"] * 2
    assert sum(one.took_s for one in found) == 34.0


def test_an_interrupted_one_goes_on_with_the_triples_it_has(tmp_path: Path) -> None:
    path, whole = tmp_path / "t.jsonl", Machine({"plain": NOISY, "mine": NOISY})
    expected = list(whole.triples(tmp_path / "whole.jsonl", minutes=1.0))
    assert len(expected) == 15
    killed: Iterator[Triple] = iter(Machine(whole.second_s).triples(path, minutes=1.0))
    for _ in range(5):
        next(killed)
    del killed
    path.write_bytes(path.read_bytes() + b'{"key": "k", "candi')
    rest = Machine(whole.second_s)
    assert list(rest.triples(path, minutes=1.0)) == expected
    assert rest.asked == whole.asked[5:]
    assert list(Machine(whole.second_s).triples(path, minutes=1.0)) == expected  # finished: nothing is measured
    assert len(list(rest.triples(path, minutes=2.0))) == 30  # more time goes on from there


def test_triples_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(triple("plain", 0).model_copy(update={"key": "other"}).model_dump_json() + "\n")
    with pytest.raises(ConfigError, match="is of an audit with other settings"):
        list(Machine({"plain": STEADY}).triples(path, minutes=1.0))


def test_the_numbers_of_triples() -> None:
    found = [triple("mine", number, second_s=1.0, candidate_s=0.5) for number in range(LEAST_SAMPLES)]
    numbers = speed_numbers(found)
    assert (numbers.triples, numbers.tokens_per_s, numbers.strict_tokens_per_s) == (6, 64.0, 32.0)
    assert (numbers.ratio_to_strict, numbers.strict_ratio_to_itself) == (Interval(2, 2, 2), Interval(1, 1, 1))
    assert numbers.protocol_met
    few = speed_numbers(found[:-1])
    assert (few.ratio_to_strict, few.protocol_met) == (Interval(2.0, None, None), False)
    assert speed_numbers([]).ratio_to_strict is None
    slower = speed_numbers([replace_second(one, 1.04) for one in found])  # always: narrow, and not around 1
    assert (slower.strict_ratio_to_itself, slower.protocol_met) == (Interval(1.04, 1.04, 1.04), False)
    assert slower.ratio_to_strict == Interval(2.04, 2.04, 2.04)


def replace_second(one: Triple, second_s: float) -> Triple:
    return one.model_copy(update={"strict_s": (one.strict_s[0], second_s)})


def test_the_report_tells_which_of_the_two_ended_it(tmp_path: Path) -> None:
    machine = Machine({"plain": STEADY, "mine": NOISY, "late": NOISY})
    triples = machine.triples(tmp_path / "t.jsonl", minutes=1.0)
    found = [one for one in triples if one.candidate != "late"]
    speed = speed_report(found, triples, num_tokens=32)
    assert speed["triples"][0]["strict_s"] == [1.0, 1.0]
    text = markdown(REPORT | {"speed": speed})
    assert "| triples, with 95 % intervals | plain | mine | late |" in text
    assert "| protocol met |" + " **no**, the time was over |" * 3 in text
    triples = replace(triples, minutes=2.0)
    text = markdown(REPORT | {"speed": speed_report(list(triples), triples, num_tokens=32)})
    assert "| protocol met | yes | **no**, the time was over |" in text
    assert "| strict / strict | 1.000 [" in text
    assert "2 of 2 minutes were taken" in text
    assert "not timed against itself" not in text
    assert "Strict was not timed against itself" in markdown(REPORT)


REPORT = {
    "arms": {}, "paired": {}, "profiles": {}, "prompts": 1, "max_tokens": 32, "batch": 1,
    "target": {"model": "m", "dtype": "float32"}, "drafter": {"kind": "model"},
    "provenance": {"date": "", "processor": "", "command": ""},
}  # fmt: skip


def test_answers_of_an_audit_depend_on_the_batch_and_names_that_a_profiles_hash_leaves_out(tmp_path: Path) -> None:
    profile = load_profile("asd")
    engine = profile.engine.model_copy(update={"max_sessions": 2})
    others = [profile.model_copy(update={"engine": engine}), profile.model_copy(update={"name": "mine"})]
    assert {one.hash for one in others} == {profile.hash}
    assert len({AuditRuns([one], [], 20, tmp_path / "a.jsonl").key for one in (profile, *others)}) == 3


def test_prompts_take_turns_and_none_comes_twice_in_a_triple() -> None:
    prompts = [Prompt(id=name, turns=(name,)) for name in "abcde"]
    assert ["".join(one.id for one in rotated(prompts, 2, number)) for number in range(4)] == ["ab", "cd", "ea", "bc"]
    assert len(rotated(prompts, 8, 3)) == 5


@dataclass
class Steps:
    """A clock that stands still but for what it is asked to time."""

    now: Iterator[int] = field(default_factory=lambda: count())

    def __call__(self) -> float:
        return float(next(self.now))


def endless(name: str, salt: str, *, max_tokens: int = 16) -> GenerationRequest:
    stops = frozenset(plain(arithmetic, (5, 9), 12))
    return replace(request(name, max_tokens=max_tokens, stop_ids=stops, min_tokens=max_tokens), salt=salt)


def test_no_stop_ends_fixed_work_and_reading_ahead_is_not_timed() -> None:
    model = ScriptedModel(arithmetic, feed_passes=3)
    scheduler = make_scheduler(model, oracle(arithmetic, right=2))
    assert fixed_work_s(scheduler, [endless("a", "x"), endless("b", "x")], Steps()) == 1.0
    assert scheduler.stats.finished == scheduler.stats.cancelled == 2
    assert model.open_sessions == {}
    short = replace(endless("c", "x"), limits=replace(endless("c", "x").limits, min_tokens=0))
    with pytest.raises(DrafthouseError, match="must emit 16 tokens, got 1"):
        fixed_work_s(scheduler, [short], Steps())


def test_what_was_read_ahead_is_not_remembered_but_what_was_answered_is() -> None:
    cache = SuffixCache()
    scheduler = make_scheduler(ScriptedModel(arithmetic), SuffixDrafter(cache), max_draft=8)
    read_ahead(scheduler, [endless("a", "x")])
    assert cache.num_tokens == 0
    assert scheduler.stats.emitted >= 14
    fixed_work_s(scheduler, [endless("a", "x")], Steps())
    assert (cache.num_tokens, scheduler.stats.accepted) == (16, 0)
    fixed_work_s(scheduler, [endless("a", "x")], Steps())
    assert scheduler.stats.accepted > 0


class Tokenizer:
    """Of what an audit asks."""

    stop_ids = frozenset(plain(arithmetic, (5, 9), 12))

    def render_chat(self, messages: object) -> Ids:
        return as_ids([5, 9])


def test_a_side_learns_nothing_from_the_others_and_all_do_the_same_work(tmp_path: Path) -> None:
    profile = load_profile("asd")
    scheduler = make_scheduler(ScriptedModel(arithmetic), SuffixDrafter(SuffixCache()), max_draft=5)
    limits = SchedulerLimits(4, 256, 64, 5, profile.rule)
    built = Built(profile, scheduler, limits, Tokenizer())  # type: ignore[arg-type]
    prompts = [Prompt(id=name, turns=(name,)) for name in "abc"]
    work = FixedWork(AuditRuns([profile], prompts, 20, tmp_path / "a.jsonl", _engines={"asd": built}), Steps())
    found = work.triple("asd", 0)
    assert (found.strict_s, found.candidate_s, found.took_s) == ((1.0, 1.0), 1.0, 7.0)
    assert (found.prompt_ids, found.num_tokens) == (("a", "b", "c"), 60)
    assert scheduler.stats.finished == 9
    drafted = scheduler.stats.drafted
    assert drafted > 0
    assert scheduler.stats.accepted == 0  # the text does not repeat itself, and nobody knew it
    work.triple("plain", 0)
    assert scheduler.stats.drafted == drafted + 2 * drafted // 3


def test_a_failure_while_reading_ahead_is_told() -> None:
    scheduler = make_scheduler(ScriptedModel(arithmetic, feed_passes=9), oracle(arithmetic))
    submitted = endless("a", "x")

    class Failing:
        """The scheduler as an engine's thread would leave it after a pass that failed."""

        has_work = True
        submit = scheduler.submit
        cancel = scheduler.cancel

        def step(self) -> None:
            scheduler.step()
            scheduler.fail_all("no memory")

    with pytest.raises(DrafthouseError, match="failed: no memory"):
        read_ahead(Failing(), [submitted])  # type: ignore[arg-type]
