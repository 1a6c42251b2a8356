"""How well a target without some layers stands for the whole one: many masks, in place, against cached rows; and what
its outputs and its passes cost.

The target is loaded once. Its own rows for every scored position are computed once and kept: n rows of V float32.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from serving.build_drafter import build_drafter, feature_layers
from serving.build_via import mask_of
from serving.config import Profile, ViaVerifier
from serving.models.kv_store import KVShape, KVStore
from serving.models.loading import LoadOptions, load_packed_lm
from serving.models.packed_lm import PackedLM
from serving.models.slim import slim_in_place
from serving.models.tokenizer import ChatTokenizer
from serving.protocols import DraftRequest, ScoreRequest
from serving.types import Floats, Ids
from tuning.dimr import Agreement, ByDialogue, compare, mean
from tuning.mask_space import Mask
from tuning.selfgen import Dialogue
from tuning.via_cost import PassTimes

_PREFILL = 4096
_CONTEXT = 128
_TIMINGS = 15
_BATCH = 16  # dialogues


@dataclass(frozen=True)
class Cut:
    """Which part of an answer becomes rows: `length` tokens that begin anywhere within its first `reach`.

    What stands before them is context, which each model reads by itself. So a row late in an answer costs the reading
    of it, and few rows of each of many answers say more than many rows of a few, whose errors go together.
    """

    length: int = 32
    reach: int = 96

    def apply(self, dialogue: Dialogue, rng: np.random.Generator) -> Dialogue:
        """The part as the output, what stands before it as the prompt."""
        latest = min(self.reach, len(dialogue.output_ids)) - self.length
        start = int(rng.integers(0, max(0, latest) + 1))
        context = np.concatenate([dialogue.prompt_ids, dialogue.output_ids[:start]])
        return Dialogue(context, dialogue.output_ids[start : start + self.length])


def excerpts(dialogues: Iterator[Dialogue], cut: Cut, *, num_rows: int, seed: int) -> list[Dialogue]:
    """One excerpt of each of as many dialogues as give `num_rows` rows, fewer where they end; takes no more of them."""
    rng = np.random.default_rng(seed)
    taken: list[Dialogue] = []
    left = num_rows
    while left > 0 and (dialogue := next(dialogues, None)) is not None:
        part = cut.apply(dialogue, rng)
        if len(part.output_ids):
            taken.append(Dialogue(part.prompt_ids, part.output_ids[:left]))
            left -= len(taken[-1].output_ids)
    return taken


def load_target(model: str, *, dtype: str, max_length: int, feature_layers: tuple[int, ...] = ()) -> PackedLM:
    """The target with one KV row for a text of `max_length` tokens, and the features of those layers beside it."""
    return load_packed_lm(
        model,
        LoadOptions(
            role="target",
            dtype=dtype,
            num_rows=1,
            max_length=max_length,
            prefill_chunk=_PREFILL,
            vocab_size=ChatTokenizer.load(model).vocab_size,
            feature_layers=feature_layers,
        ),
    )


class MaskBench:
    """Judges masks of `target` on `dialogues`."""

    def __init__(self, target: PackedLM, dialogues: Sequence[Dialogue]) -> None:
        self._target = target
        self._dialogues = list(dialogues)
        self._stores: dict[tuple[KVShape, ...], KVStore] = {}
        self._rows = [_log_probs(target, dialogue) for dialogue in self._dialogues]

    @property
    def num_layers(self) -> int:
        return len(self._target.store.shapes)

    @property
    def num_rows(self) -> int:
        """Scored positions."""
        return sum(len(rows) for rows in self._rows)

    def agreement(self, skipped: Mask) -> Agreement:
        """Of the target without the layers `skipped` with the whole one."""
        return mean(self.by_dialogue(skipped))

    def by_dialogue(self, skipped: Mask) -> ByDialogue:
        """For each dialogue its rows and the agreement on them. Texts that begin alike share that part."""
        slim = self.slim(skipped)
        return [
            (len(rows), compare(rows, _log_probs(slim, dialogue)))
            for dialogue, rows in zip(self._dialogues, self._rows, strict=True)
        ]

    def slim(self, skipped: Mask) -> PackedLM:
        """The target without the layers `skipped`, on its own weights, in rows that all masks of a size share."""
        kept = [layer for layer in range(self.num_layers) if layer not in skipped]
        decoder = self._target.decoder.keeping(kept)
        whole, shapes = self._target.store, tuple(decoder.shapes)
        if shapes not in self._stores:
            self._stores[shapes] = KVStore(list(shapes), 1, whole.capacity, whole.dtype, whole.device)
        for row in self._stores[shapes].rows:
            row.length = 0  # of another mask
        return self._target.with_decoder(decoder, self._stores[shapes], with_logsumexp=False)


def each_judged(
    target: PackedLM, dialogues: Sequence[Dialogue], masks: Sequence[Mask]
) -> Iterator[dict[Mask, ByDialogue]]:
    """The agreement of each mask on each dialogue, batch by batch: rows of the whole target are held for one only."""
    for start in range(0, len(dialogues), _BATCH):
        bench = MaskBench(target, dialogues[start : start + _BATCH])
        yield {mask: bench.by_dialogue(mask) for mask in masks}


def _log_probs(model: PackedLM, dialogue: Dialogue) -> Floats:
    """float32 [n, V]: of each token of the output, given what stands before it."""
    logits = model.all_logits(dialogue.ids[:-1], first=len(dialogue.prompt_ids) - 1)
    rows: Floats = torch.log_softmax(logits, dim=-1).cpu().numpy()
    return rows


@dataclass(frozen=True)
class Fidelity:
    """Of an output's tokens under the target, means: nats below its best token, share of its own, log probability."""

    regret: float
    top1: float
    logprob: float
    num_tokens: int

    @classmethod
    def mean(cls, parts: "Sequence[Fidelity]") -> "Fidelity":
        """Over all tokens of `parts`."""
        count = sum(part.num_tokens for part in parts)
        weights = [part.num_tokens / max(1, count) for part in parts]
        return cls(
            regret=sum(weight * part.regret for weight, part in zip(weights, parts, strict=True)),
            top1=sum(weight * part.top1 for weight, part in zip(weights, parts, strict=True)),
            logprob=sum(weight * part.logprob for weight, part in zip(weights, parts, strict=True)),
            num_tokens=count,
        )


def fidelity(target: PackedLM, dialogue: Dialogue) -> Fidelity:
    """One pass over prompt and output."""
    rows = _log_probs(target, dialogue)
    picked = rows[np.arange(len(rows)), dialogue.output_ids]
    top1 = rows.argmax(axis=1) == dialogue.output_ids
    regret = rows.max(axis=1) - picked
    return Fidelity(float(regret.mean()), float(top1.mean()), float(picked.mean()), len(rows))


def pass_times(profile: Profile, rows: Sequence[int]) -> PassTimes:
    """Of the target and the slim verifier of `profile`, as `mask_pass_times`, and of a token of its drafter."""
    assert isinstance(profile.verifier, ViaVerifier)
    roomy = _with_room(profile, measured_length(rows))
    target = load_target(
        profile.target.model,
        dtype=profile.target.dtype,
        max_length=roomy.engine.max_length,
        feature_layers=feature_layers(profile),
    )
    drafter = build_drafter(roomy, features=target)
    drafting = DraftRequest("measure", _measured_ids(0), _CONTEXT // 2, profile.max_draft)
    draft = _Work("draft", 0, lambda: drafter.start([drafting]).result())
    seconds = _medians([draft, *_passes(target, slim_in_place(target, mask_of(profile, profile.verifier).kept), rows)])
    times = _times(seconds, rows, draft_s=seconds["draft", 0] / max(1, profile.max_draft))
    return replace(times, is_seeded=profile.verifier.seed_from_full)


def _with_room(profile: Profile, num_tokens: int) -> Profile:
    """Its sequences may have `num_tokens` tokens, whatever it says itself."""
    longest = max(profile.engine.max_length, num_tokens)
    return profile.model_copy(update={"engine": profile.engine.model_copy(update={"max_length": longest})})


def mask_pass_times(target: PackedLM, kept: Sequence[int], rows: Sequence[int]) -> PassTimes:
    """Medians on this machine behind a text of 128 tokens, in turns: passes of `rows` rows over all layers or `kept`.

    The target needs a free row that holds the text and most of `rows`.
    """
    seconds = _medians(_passes(target, slim_in_place(target, kept), rows))
    target.close("measure")
    return _times(seconds, rows)


def measured_length(rows: Sequence[int]) -> int:
    """Tokens that a target must hold for `mask_pass_times`."""
    return _CONTEXT + max(rows)


@dataclass(frozen=True)
class _Work:
    """What is timed: passes of `rows` rows, or a draft."""

    name: str
    rows: int
    do: Callable[[], object]


def _passes(full: PackedLM, slim: PackedLM, rows: Sequence[int]) -> list[_Work]:
    ids = _measured_ids(max(rows))
    works = []
    for name, model in (("full", full), ("slim", slim)):
        model.open("measure", ids)
        works += [
            _Work(name, count, _pass(model, ScoreRequest("measure", ids[: _CONTEXT + count], count))) for count in rows
        ]
    return works


def _measured_ids(most: int) -> Ids:
    return np.random.default_rng(0).integers(10, 100, _CONTEXT + most).astype(np.int32)


def _medians(works: Sequence[_Work]) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], list[float]] = {(work.name, work.rows): [] for work in works}
    for _ in range(_TIMINGS):
        for work in works:
            found[work.name, work.rows].append(_seconds(work.do))
    return {key: statistics.median(seconds[2:]) for key, seconds in found.items()}  # the first ones read the text


def _times(seconds: dict[tuple[str, int], float], rows: Sequence[int], *, draft_s: float = 0.0) -> PassTimes:
    full, slim = ({count: seconds[name, count] for count in rows} for name in ("full", "slim"))
    return PassTimes(full, slim, draft_s)


def _pass(model: PackedLM, request: ScoreRequest) -> Callable[[], object]:
    return lambda: model.score([request])


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
