"""The arms on toys: a tiny random Llama through transformers' loops, a scripted model through ours."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from jobs.arms import ChunkClock, Work, assistant_of, profile_arm, stock_arms
from jobs.beside import Beside
from jobs.figures import Timing
from jobs.reference import StepClock
from serving.build import Built
from serving.config import ModelConfig, ModelDrafter, Profile, SuffixDrafter
from serving.decode.grouping import Grouping
from serving.decode.guard import FixedDrafts
from serving.decode.limits import SchedulerLimits
from serving.decode.scheduler import Scheduler
from serving.drafters.ready import PlainDrafter
from serving.errors import ConfigError, RequestError
from serving.models.loading import LoadOptions, load_packed_lm
from serving.models.tokenizer import ChatTokenizer
from serving.protocols import Drafter, DraftRequest
from serving.requests import Chunk, Receipt
from serving.types import Ledger, as_ids
from serving.verifiers.full import FullVerifier
from tests.decode.scripted import ScriptedDrafter, ScriptedModel, arithmetic, make_scheduler, oracle, plain, spell
from tests.models.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

NO_STOP = frozenset({198})
PROMPTS = [as_ids([5, 9, 11]), as_ids([7, 3, 4, 8, 6])]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(model=saved(tmp_path_factory.mktemp("target")), dtype="float32")


def saved(folder: Path, **overrides: object) -> str:
    tiny_model("llama", **overrides).save_pretrained(folder)
    return str(folder)


def work(**changes: object) -> Work:
    return Work(**{"prompts": PROMPTS, "stop_ids": NO_STOP, "max_tokens": 9, **changes})  # type: ignore[arg-type]


def test_the_stock_arms_say_the_same_and_time_every_answer(target: ModelConfig, tmp_path: Path) -> None:
    assistant = saved(tmp_path, num_hidden_layers=1)
    arms = stock_arms(["generate", "lookup", "assisted"], target, assistant, work())
    found = {name: arm.measure() for name, arm in arms.items()}
    assert [[len(ids) for ids in one.outputs] for one in found.values()] == [[9, 9]] * 3
    assert found["generate"].outputs == found["lookup"].outputs == found["assisted"].outputs
    for measured in found.values():
        spent_ms = sum(8 * tpot for tpot in measured.tpots_ms if tpot is not None)
        assert 0.0 < spent_ms < 1000.0 * measured.seconds
    assert all(arm.is_comparable for arm in arms.values())


def test_a_padded_batch_says_what_single_prompts_do(target: ModelConfig) -> None:
    one, both = (stock_arms(["generate"], target, None, work(batch=batch))["generate"].measure() for batch in (1, 2))
    assert one.outputs == both.outputs
    assert None not in both.tpots_ms


def test_stock_samples_repeat_with_the_seed_and_are_not_comparable(target: ModelConfig) -> None:
    def outputs(seed: int) -> list[list[int]]:
        arm = stock_arms(["generate"], target, None, work(temperature=1.5, seed=seed))["generate"]
        assert not arm.is_comparable
        first, second = arm.measure().outputs, arm.measure().outputs
        assert first == second
        return first

    assert outputs(1) != outputs(2)


@pytest.mark.parametrize(
    ("num_tokens", "timing"),
    [(3, Timing(3, 1.0, 4.0)), (2, Timing(2, 1.0, 2.0)), (9, Timing(9, 1.0, 4.0)), (1, Timing(1, 1.0, 1.0))],
)
def test_a_row_ends_with_its_own_last_step(num_tokens: int, timing: Timing) -> None:
    assert StepClock([10.0, 11.0, 12.0, 14.0]).timing(num_tokens) == timing


def test_the_stock_loop_reports_the_prompt_then_each_step() -> None:
    clock, network = StepClock(), tiny_model("llama")
    ids = torch.tensor([[5, 9, 11]])
    network.generate(ids, attention_mask=torch.ones(1, 3), max_new_tokens=4, do_sample=False, streamer=clock)
    assert len(clock.times_s) == 1 + 4
    assert clock.times_s == sorted(clock.times_s)


def test_an_assistant_of_other_ids_is_refused(target: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--assistant: must have the target's 199 ids, but .* has 150"):
        stock_arms(["assisted"], target, saved(tmp_path, vocab_size=150), work())


def test_the_assistant_is_the_first_draft_model_of_the_profiles() -> None:
    profiles = [Profile(name="a", drafter=SuffixDrafter()), Profile(name="b", drafter=ModelDrafter(model="mine"))]
    assert assistant_of(profiles) == "mine"
    assert assistant_of(profiles[:1]) is None


@dataclass(frozen=True)
class Recording:
    """A scripted model and the scheduler around it, as `build` would return them."""

    model: ScriptedModel
    built: Built


@pytest.fixture
def recording() -> Recording:
    model = ScriptedModel(arithmetic)
    limits = SchedulerLimits(max_sessions=4, max_length=256, max_queued=64, max_draft=5)
    tokenizer = ChatTokenizer("scripted", NO_STOP, 199, None)
    scheduler = make_scheduler(model, oracle(arithmetic, right=2))
    return Recording(model, Built(Profile(name="scripted"), scheduler, limits, tokenizer))


def test_a_profile_answers_in_order_with_what_speculation_did(recording: Recording) -> None:
    measured = profile_arm(recording.built, work()).measure()
    assert measured.outputs == [plain(arithmetic, ids.tolist(), 9) for ids in PROMPTS]
    assert measured.accepted_length is not None
    assert measured.accepted_length > 1.5
    assert measured.target_passes_per_token is not None
    assert measured.target_passes_per_token < 0.5
    assert all(tpot is not None and 0.0 < tpot < 1000.0 * measured.seconds for tpot in measured.tpots_ms)


def test_a_prompt_that_can_never_fit_is_refused_before_anything_runs(recording: Recording) -> None:
    with pytest.raises(RequestError, match="exceeds the 256 tokens"):
        profile_arm(recording.built, work(prompts=[as_ids([3] * 250)]))
    assert recording.model.num_passes == 0


def test_beside_an_application_prompts_are_timed_in_cycles(recording: Recording) -> None:
    beside = Beside(recording.built, work(max_tokens=3))
    assert len(beside.tpot_ms(0, range(3), 2)) == 3
    assert all(one is not None and one > 0.0 for one in beside.tpot_ms(1, [3, 4], 1))
    Beside(recording.built, work(max_tokens=3), max_draft=0).tpot_ms(2, range(2), 1)


def around_tiny(model: str, drafter: Drafter) -> Built:
    """A tiny Llama in our loop, as `build` would put it together from a model with a tokenizer."""
    options = LoadOptions("target", "float32", num_rows=2, max_length=64, prefill_chunk=8, vocab_size=199, max_draft=4)
    limits = SchedulerLimits(max_sessions=2, max_length=64, max_queued=4, max_draft=4)
    scheduler = Scheduler(
        verifier=FullVerifier(load_packed_lm(model, options)),
        drafter=drafter,
        decode=spell,
        limits=limits,
        grouping=Grouping(shares_cores=True),
        policy=FixedDrafts(4),
    )
    return Built(Profile(name="tiny"), scheduler, limits, ChatTokenizer("tiny", NO_STOP, 199, None))


def foresight(outputs: list[list[int]]) -> ScriptedDrafter:
    """Drafts the next two tokens of the output that is coming, then a wrong one."""
    texts = [[*prompt.tolist(), *ids] for prompt, ids in zip(PROMPTS, outputs, strict=True)]

    def guess(request: DraftRequest) -> list[int]:
        at, ids = len(request.ids), request.ids.tolist()
        text = next(text for text in texts if text[:at] == ids)
        return [*text[at : at + 2], 0][: request.max_draft]

    return ScriptedDrafter(guess)


def test_seeded_samples_are_the_same_with_drafts_and_in_every_repeat(target: ModelConfig) -> None:
    sampled = work(temperature=0.7, seed=3)
    plain_arm = profile_arm(around_tiny(target.model, PlainDrafter()), sampled)
    first, again = plain_arm.measure(), plain_arm.measure()
    assert first.outputs == again.outputs
    drafted = profile_arm(around_tiny(target.model, foresight(first.outputs)), sampled).measure()
    assert drafted.outputs == first.outputs
    assert drafted.accepted_length is not None
    assert drafted.accepted_length > 1.0
    other = profile_arm(around_tiny(target.model, PlainDrafter()), replace(sampled, seed=4)).measure()
    assert other.outputs != first.outputs


def test_every_prompt_has_its_own_seed() -> None:
    there = work(temperature=0.7, seed=5)
    assert [there.sampling(index).seed for index in range(3)] == [5, 6, 7]
    assert there.sampling(0).temperature == 0.7


def test_an_arms_clock_stands_still_while_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("jobs.arms.time.perf_counter", lambda: now[0])
    clock = ChunkClock()
    now[0] = 12.0
    clock.note(Chunk("a", (5,), "x", Receipt(), Ledger()))
    clock.pause()
    now[0] = 100.0
    assert clock.now_s == 2.0
    clock.resume()
    now[0] = 101.0
    clock.note(Chunk("a", (6,), "y", Receipt(), Ledger()))
    assert (clock.timing("a", 2).first_s, clock.timing("a", 2).last_s) == (2.0, 3.0)
