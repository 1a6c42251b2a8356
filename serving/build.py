"""The composition root: from a profile to objects that work, in one process. No Ray here.

Torch is imported only where a model is loaded: a process that keeps a suffix cache starts seconds sooner.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from serving.build_drafter import build_drafter, feature_layers, warm_up
from serving.build_rules import build_rules
from serving.config import EngineConfig, HybridDrafter, Profile, SuffixDrafter, ViaVerifier
from serving.decode.costs import CostModel
from serving.decode.engine import Engine
from serving.decode.grouping import Grouping
from serving.decode.guard import DraftPolicy, FixedDrafts, Guard
from serving.decode.limits import SchedulerLimits
from serving.decode.scheduler import Scheduler
from serving.decode.source_guard import SourceGuard
from serving.decode.text import remembering
from serving.drafters.chooser import Chooser
from serving.models.tokenizer import ChatTokenizer
from serving.protocols import (
    Drafter,
    DraftRequest,
    ReadFeatures,
    RemoteModel,
    ScoreRequest,
    ScoringModel,
    Verifier,
)
from serving.rules.book import RuleBook
from serving.session import Session
from serving.types import DraftLimits, as_ids
from serving.verifiers.full import FullVerifier
from serving.verifiers.watched import WatchedVerifier

if TYPE_CHECKING:
    from torch import Tensor

    from serving.models.loading import LoadOptions
    from serving.models.packed_lm import PackedLM

# Rows of the largest pass that is timed at start-up; costs beyond it are extrapolated.
_MOST_MEASURED = 128
_TIMINGS = 9
_FEW_ROWS = 8  # what the price of a single session's draft is made of
_MEASURED_TEXT = 2  # tokens: the shortest that a sequence may be limited to


@dataclass(frozen=True)
class Built:
    """A scheduler ready to run, and what it was made from; the target's features where the drafter reads them."""

    profile: Profile
    scheduler: Scheduler
    limits: SchedulerLimits
    tokenizer: ChatTokenizer
    read_features: ReadFeatures | None = None
    rules: RuleBook = field(default_factory=RuleBook)

    def engine(self) -> Engine:
        """The same scheduler behind its own thread (not started)."""
        return Engine(self.scheduler, self.limits)


@dataclass(frozen=True)
class RemoteRoles:
    """Roles of a profile that are elsewhere; those that are None are made here."""

    drafter: Drafter | None = None
    slim: RemoteModel | None = None


LOCAL = RemoteRoles()


@dataclass(frozen=True)
class Watch:
    """`take` gets the name of every session that ends, and what entered the target's `layers` (of which their number is
    its output) at all of its tokens but the last, which no pass has read: [n - 1, F].
    """

    layers: tuple[int, ...]
    take: "Callable[[str, Tensor], None]"

    def verifier(self, inner: Verifier, target: "PackedLM") -> Verifier:
        """`inner`, watched."""

        def on_end(session: Session) -> None:  # a copy: the row is another's in a moment
            self.take(session.request_id, target.features(session.request_id, session.tokens[:-1], 0).clone())

        return WatchedVerifier(inner, on_end)


def build(
    profile: Profile,
    *,
    remote: RemoteRoles = LOCAL,
    rules: RuleBook | None = None,
    chooser: Chooser | None = None,
    watch: Watch | None = None,
) -> Built:
    """The target side of `profile`, warmed up.

    `rules` judge and `chooser` chooses, where the drafter is a hybrid made here, in place of the profile's own.
    `watch` is for profiles whose drafter reads no features.
    """
    from serving.models.loading import load_packed_lm
    from serving.models.shipped_features import feature_rows

    tokenizer = ChatTokenizer.load(profile.target.model)
    layers = feature_layers(profile) if watch is None else watch.layers
    # First: its table may be missing, and models take long to load.
    rules = rules or build_rules(profile, tokenizer)
    target = load_packed_lm(profile.target.model, _target_options(profile, tokenizer.vocab_size, layers))
    warm_up(target, num_rows=min(5, profile.engine.max_length - 1))
    limits = scheduler_limits(profile)
    drafter = remote.drafter or build_drafter(profile, tokenizer=tokenizer, features=target, chooser=chooser)
    verifier = _verifier(profile, target, remote.slim)
    scheduler = Scheduler(
        verifier=verifier if watch is None else watch.verifier(verifier, target),
        drafter=drafter,
        decode=remembering(tokenizer.decode),
        limits=limits,
        grouping=Grouping(shares_cores=remote.drafter is None),
        policy=_policy(profile, target, drafter, is_local=remote.drafter is None),
        rules=rules,
    )
    reads = partial(feature_rows, target) if layers and watch is None else None
    return Built(profile, scheduler, limits, tokenizer, reads, rules)


def _target_options(profile: Profile, vocab_size: int, feature_layers: tuple[int, ...]) -> "LoadOptions":
    from serving.models.loading import LoadOptions

    engine, verifier = profile.engine, profile.verifier
    return LoadOptions(
        role="target",
        dtype=profile.target.dtype,
        num_rows=engine.max_sessions,
        max_length=engine.max_length,
        prefill_chunk=engine.prefill_chunk,
        vocab_size=vocab_size,
        max_draft=profile.max_draft,
        max_unseen=verifier.max_unverified if isinstance(verifier, ViaVerifier) else 0,
        feature_layers=feature_layers,
        # A round that waits for a prefix is a round without a verdict, which a second tier must not see.
        waits_for_prefixes=not isinstance(verifier, ViaVerifier),
    )


def _verifier(profile: Profile, target: "PackedLM", remote_slim: RemoteModel | None) -> Verifier:
    if not isinstance(profile.verifier, ViaVerifier):
        return FullVerifier(target)
    from serving.build_via import build_via

    return build_via(profile, profile.verifier, full=target, slim=remote_slim)


def scheduler_limits(profile: Profile) -> SchedulerLimits:
    """The limits that `profile` sets."""
    engine: EngineConfig = profile.engine
    greedy_only = "verifier 'via'" if isinstance(profile.verifier, ViaVerifier) else None
    return SchedulerLimits(
        engine.max_sessions, engine.max_length, engine.max_queued, profile.max_draft, profile.rule, greedy_only
    )


def _policy(profile: Profile, target: ScoringModel, drafter: Drafter, *, is_local: bool) -> DraftPolicy:
    """A drafter elsewhere may not be in reach yet: what its drafts take is found out when they come."""
    if not profile.engine.guard or profile.max_draft == 0:
        return FixedDrafts(profile.max_draft)
    costs = _pass_costs(target, profile)

    def of_model(max_draft: int) -> Guard:
        ask_s, token_s = drafting_s(drafter, target, max_draft=max_draft) if is_local else (0.0, 0.0)
        return Guard(CostModel(costs), max_draft=max_draft, ask_s=ask_s, token_s=token_s, is_judged=True)

    match profile.drafter:
        case HybridDrafter(cache=cache, model=model):
            by_look_up = Guard(CostModel(costs), max_draft=cache.max_draft)
            return SourceGuard(cache=by_look_up, model=of_model(model.max_draft))
        case SuffixDrafter():
            return Guard(CostModel(costs), max_draft=profile.max_draft)
        case _:
            return of_model(profile.max_draft)


def drafting_s(drafter: Drafter, target: ScoringModel, *, max_draft: int) -> tuple[float, float]:
    """Seconds that the model of `drafter` takes to be asked, and for each token, alone and with a short text.

    Zeros where there is no model.
    """
    ids = as_ids([1] * _MEASURED_TEXT)
    target.open("measure", ids)
    target.score([ScoreRequest("measure", ids)])  # the features of its text are the target's
    taken: dict[int, list[float]] = {1: [], max_draft: []}
    num_passes = dict.fromkeys(taken, 0)
    for count in [1, *[*taken] * _TIMINGS]:  # the first has the text read
        limits = DraftLimits(cache=0, model=count)
        started = time.perf_counter()
        (draft,) = drafter.start([DraftRequest("measure", ids, len(ids), count, max_by_source=limits)]).result()
        taken[count].append(time.perf_counter() - started)
        num_passes[count] = draft.num_passes
    drafter.close("measure", None)
    target.close("measure")
    one_s, all_s = statistics.median(taken[1][1:]), statistics.median(taken[max_draft][-_TIMINGS:])
    if not num_passes[1]:
        return 0.0, 0.0
    more = num_passes[max_draft] - num_passes[1]
    token_s = min(one_s, max(0.0, all_s - one_s) / more) if more else one_s
    return one_s - token_s, token_s


def _pass_costs(target: ScoringModel, profile: Profile) -> dict[int, float]:
    """Seconds by rows, of passes over one sequence: what a row costs hardly depends on whose it is."""
    most = min(_MOST_MEASURED, profile.engine.max_length // 2, profile.engine.max_sessions * (profile.max_draft + 1))
    counts = [rows for rows in (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128) if rows <= max(2, most)]
    seconds: dict[int, list[float]] = {rows: [] for rows in counts}
    for turn in range(_TIMINGS):  # in turns, so that a slow moment of the machine does not fall on one count alone
        for rows in reversed(counts):  # what follows 128 rows is slower than what follows 2
            if rows <= _FEW_ROWS or turn < _TIMINGS // 2:
                seconds[rows].append(_pass_s(target, rows))
    least = [min(seconds[rows]) for rows in counts]  # whatever disturbs a pass makes it longer
    return dict(zip(counts, np.maximum.accumulate(least).tolist(), strict=True))


def _pass_s(model: ScoringModel, rows: int) -> float:
    """Seconds of one pass over `rows` rows."""
    ids = as_ids([1] * (rows + 1))
    model.open("measure", ids)
    started = time.perf_counter()
    model.score([ScoreRequest("measure", ids, num_rows=rows)])
    seconds = time.perf_counter() - started
    model.close("measure")
    return seconds
