"""The arms of the paired benchmark: transformers' own decoding, and profiles of ours."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jobs.comparison import Arm, Measured
from jobs.figures import Timing, accepted_length
from jobs.hybrid_arms import request_name
from jobs.reference import StockGenerate
from serving.build import Built
from serving.config import ModelConfig, ModelDrafter, Profile
from serving.decode.offline import Completion, rounds
from serving.errors import ConfigError
from serving.models.draft_lm import is_draft_lm, load_whole_draft_lm
from serving.models.loading import load_network
from serving.models.packed import Network
from serving.requests import Chunk, GenerationRequest, Limits, Receipt, Sampling
from serving.types import Ids

LOOKUP_TOKENS = 10
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Work:
    """What every arm does: the same prompts, so many new tokens, so many sequences at once, at one temperature."""

    prompts: Sequence[Ids]
    stop_ids: frozenset[int]
    max_tokens: int
    batch: int = 1
    temperature: float = 0.0
    seed: int = 0

    def sampling(self, index: int) -> Sampling:
        """Prompt `index` has a seed of its own, the same in every arm and repeat."""
        return Sampling(temperature=self.temperature, seed=self.seed + index)

    def requests(self, *, call: int = 0) -> list[GenerationRequest]:
        """The prompts as requests, whose memories no other call shares."""
        limits, salt = Limits(self.max_tokens, self.stop_ids), f"repeat-{call}"
        return [
            GenerationRequest(request_name(i, call=call), ids, limits, self.sampling(i), salt=salt)
            for i, ids in enumerate(self.prompts)
        ]


def stock_arms(names: Sequence[str], target: ModelConfig, assistant: str | None, work: Work) -> dict[str, Arm]:
    """`generate`, `lookup` (prompt lookup), `assisted` on one network; torch draws their samples: none is compared."""
    if not names:
        return {}
    stock = StockGenerate(target.model, target.dtype, stop_ids=work.stop_ids)
    options: dict[str, dict[str, Any]] = {"generate": {}, "lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS}}
    if "assisted" in names:
        options["assisted"] = {"assistant_model": _load_assistant(assistant, target, stock.network)}
    for name in names:  # profiles are warm when they are built
        stock.run(work.prompts[:1], max_tokens=min(WARM_UP_TOKENS, work.max_tokens), **options[name])
    return {name: _stock_arm(stock, work, options[name]) for name in names}


def assistant_of(profiles: Sequence[Profile]) -> str | None:
    """The draft LM of the first profile that has one."""
    drafters = [profile.drafter for profile in profiles]
    return next((drafter.model for drafter in drafters if isinstance(drafter, ModelDrafter)), None)


def _load_assistant(assistant: str | None, target: ModelConfig, network: Network) -> Network:
    assert assistant is not None, "the plan has it"
    load = load_whole_draft_lm if is_draft_lm(assistant) else load_network
    loaded = load(assistant, {"float32": torch.float32, "bfloat16": torch.bfloat16}[target.dtype])
    sizes = [one.config.get_text_config().vocab_size for one in (loaded, network)]
    if sizes[0] != sizes[1]:
        raise ConfigError(f"--assistant: must have the target's {sizes[1]} ids, but {assistant!r} has {sizes[0]}")
    return loaded.to(network.device)


def _stock_arm(stock: StockGenerate, work: Work, options: dict[str, Any]) -> Arm:
    def turns() -> Iterator[Measured]:
        torch.manual_seed(work.seed)
        started_s = time.perf_counter()
        answers = stock.answers(
            work.prompts, max_tokens=work.max_tokens, batch=work.batch, temperature=work.temperature, **options
        )
        seconds = time.perf_counter() - started_s
        yield Measured(seconds, [one.ids for one in answers], [one.timing.tpot_ms for one in answers])

    return Arm(turns, is_comparable=work.temperature == 0.0)


def profile_arm(built: Built, work: Work) -> Arm:
    """Requests in order, at most `max_sessions` at once. Memories are salted anew, so no repeat learns from another."""
    for request in work.requests():
        built.limits.check(request)
    calls = 0

    def turns() -> Iterator[Measured | None]:
        nonlocal calls
        calls += 1
        return _turns(built, work.requests(call=calls))

    return Arm(turns)


def _turns(built: Built, requests: Sequence[GenerationRequest]) -> Iterator[Measured | None]:
    clock, done = ChunkClock(), dict[str, Completion]()
    for ended in rounds(built.scheduler, requests, on_chunk=clock.note):
        clock.pause()
        done |= {one.request_id: one for one in ended}
        yield None
        clock.resume()
    completions = [done[request.request_id] for request in requests]
    yield _measured(completions, clock)


def _measured(completions: Sequence[Completion], clock: "ChunkClock") -> Measured:
    receipts = [completion.receipt for completion in completions]
    return Measured(
        clock.now_s,
        [completion.output_ids for completion in completions],
        [clock.timing(one.request_id, len(one.output_ids)).tpot_ms for one in completions],
        accepted_length(
            accepted=sum(receipt.accepted for receipt in receipts),
            rounds=sum(receipt.rounds for receipt in receipts),
            drafts_empty=sum(receipt.drafts_empty for receipt in receipts),
        ),
        round(_per_token([one.target_passes for one in receipts], receipts), 3),
        round(1000.0 * _per_token([one.rounds for one in receipts], receipts), 1),
    )


def _per_token(counts: Sequence[int], receipts: Sequence[Receipt]) -> float:
    return sum(counts) / sum(one.emitted for one in receipts)


class ChunkClock:
    """Notes when each request's first text and its last chunk came: what a client of the stream would see.

    It runs from the beginning, and can be stopped while others work.
    """

    def __init__(self) -> None:
        self._passed_s = 0.0
        self._resumed_s: float | None = time.perf_counter()
        self._first_s: dict[str, float] = {}
        self._last_s: dict[str, float] = {}

    @property
    def now_s(self) -> float:
        """Seconds that it has run."""
        running_s = 0.0 if self._resumed_s is None else time.perf_counter() - self._resumed_s
        return self._passed_s + running_s

    def pause(self) -> None:
        self._passed_s, self._resumed_s = self.now_s, None

    def resume(self) -> None:
        self._resumed_s = time.perf_counter()

    def note(self, chunk: Chunk) -> None:
        self._last_s[chunk.request_id] = now_s = self.now_s
        if chunk.text:
            self._first_s.setdefault(chunk.request_id, now_s)

    def timing(self, request_id: str, num_tokens: int) -> Timing:
        return Timing(num_tokens, self._first_s.get(request_id), self._last_s[request_id])
