"""The composition root: from a profile to objects that work, in one process. No Ray here.

Torch is imported only where a model is loaded: a process that keeps a suffix cache starts seconds sooner.
"""

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serving.build_rules import build_rules
from serving.config import Eagle3Drafter, EngineConfig, ModelDrafter, NoDrafter, Profile, SuffixDrafter
from serving.decode.costs import CostModel
from serving.decode.engine import Engine
from serving.decode.grouping import Grouping
from serving.decode.guard import FixedDrafts, Guard
from serving.decode.scheduler import Scheduler, SchedulerLimits
from serving.drafters.model import ModelDrafter as ModelDrafterRole
from serving.drafters.ready import PlainDrafter
from serving.drafters.suffix import SuffixDrafter as SuffixDrafterRole
from serving.errors import ConfigError
from serving.memory.suffix import SuffixCache
from serving.models.tokenizer import ChatTokenizer
from serving.models.vocabulary import check_same_vocabulary
from serving.protocols import Drafter, ScoreRequest, ScoringModel
from serving.rules.book import RuleBook
from serving.types import as_ids
from serving.verifiers.full import FullVerifier

if TYPE_CHECKING:  # torch is imported only where a model is loaded
    from serving.models.eagle3_lm import FeatureSource

# Rows of the largest pass that is timed at start-up; costs beyond it are extrapolated.
_MOST_MEASURED = 128
_TIMINGS = 5


@dataclass(frozen=True)
class Built:
    """A scheduler ready to run, and what it was made from."""

    profile: Profile
    scheduler: Scheduler
    limits: SchedulerLimits
    tokenizer: ChatTokenizer

    def engine(self) -> Engine:
        """The same scheduler behind its own thread (not started)."""
        return Engine(self.scheduler, self.limits)


def build(profile: Profile, *, drafter: Drafter | None = None, rules: RuleBook | None = None) -> Built:
    """The target side of `profile`, warmed up. `drafter` is a remote one; without it the drafter is made here.

    `rules` judge in place of the profile's own.
    """
    from serving.models.loading import LoadOptions, load_packed_lm

    tokenizer = ChatTokenizer.load(profile.target.model)
    target = load_packed_lm(
        profile.target.model,
        LoadOptions(
            role="target",
            dtype=profile.target.dtype,
            num_rows=profile.engine.max_sessions,
            max_length=profile.engine.max_length,
            prefill_chunk=profile.engine.prefill_chunk,
            vocab_size=tokenizer.vocab_size,
            max_draft=profile.max_draft,
            feature_layers=feature_layers(profile),
        ),
    )
    warm_up(target, num_rows=min(5, profile.engine.max_length - 1))
    limits = scheduler_limits(profile)
    is_guarded = profile.engine.guard and profile.max_draft > 0
    scheduler = Scheduler(
        verifier=FullVerifier(target),
        drafter=drafter if drafter is not None else build_drafter(profile, tokenizer=tokenizer, features=target),
        decode=tokenizer.decode,
        limits=limits,
        grouping=Grouping(shares_cores=drafter is None),
        policy=_guard(target, profile) if is_guarded else FixedDrafts(profile.max_draft),
        rules=rules or build_rules(profile, tokenizer),
    )
    return Built(profile, scheduler, limits, tokenizer)


def build_drafter(
    profile: Profile, *, tokenizer: ChatTokenizer | None = None, features: "FeatureSource | None" = None
) -> Drafter:
    """The drafter of `profile`, in this process, warmed up. Raises ConfigError where it cannot draft for the target.

    `features` are the target's, for a drafter that reads them.
    """
    match profile.drafter:
        case NoDrafter():
            return PlainDrafter()
        case SuffixDrafter() as config:
            return SuffixDrafterRole(
                SuffixCache(
                    max_depth=config.max_depth,
                    max_draft=config.max_draft,
                    factor=config.factor,
                    offset=config.offset,
                    min_prob=config.min_prob,
                    max_tokens=config.max_tokens,
                )
            )
        case ModelDrafter() as config:
            return _model_drafter(profile, config, tokenizer or ChatTokenizer.load(profile.target.model))
        case Eagle3Drafter() as config:
            if features is None:
                raise ConfigError(
                    "drafter.kind: 'eagle3' reads the target's features, so it needs placement: colocated"
                )
            return _eagle3_drafter(profile, config, features)


def feature_layers(profile: Profile) -> tuple[int, ...]:
    """Target layers whose inputs the profile's drafter reads; none for most drafters."""
    if not isinstance(profile.drafter, Eagle3Drafter):
        return ()
    from serving.models.eagle3_checkpoint import read_eagle3_config
    from serving.models.loading import read_config

    target, head = read_config(profile.target.model).get_text_config(), read_eagle3_config(profile.drafter.model)
    if head.target_hidden_size != target.hidden_size:
        raise ConfigError(
            f"drafter.model: {profile.drafter.model!r} reads features of {head.target_hidden_size} numbers, "
            f"{profile.target.model!r} has {target.hidden_size}: it was trained for another target"
        )
    return head.layers_of(target.num_hidden_layers)


def scheduler_limits(profile: Profile) -> SchedulerLimits:
    """The limits that `profile` sets."""
    engine: EngineConfig = profile.engine
    return SchedulerLimits(engine.max_sessions, engine.max_length, engine.max_queued, profile.max_draft, profile.rule)


def warm_up(model: ScoringModel, *, num_rows: int = 5) -> None:
    """Run the shapes that decoding will use once, so that the first request does not pay for them."""
    ids = as_ids([1] * (num_rows + 1))
    model.open("warm-up", ids)
    for rows in (1, num_rows):
        model.score([ScoreRequest("warm-up", ids, num_rows=rows)])
    model.close("warm-up")


def _guard(target: ScoringModel, profile: Profile) -> Guard:
    """Costs by passes over one sequence: what a row costs hardly depends on whose it is."""
    most = min(_MOST_MEASURED, profile.engine.max_length // 2, profile.engine.max_sessions * (profile.max_draft + 1))
    counts = [rows for rows in (1, 2, 4, 8, 16, 32, 64, 128) if rows <= max(2, most)]
    seconds: dict[int, list[float]] = {rows: [] for rows in counts}
    for _ in range(_TIMINGS):  # in turns, so that a slow moment of the machine does not fall on one count alone
        for rows in counts:
            seconds[rows].append(_pass_s(target, rows))
    costs = CostModel({rows: statistics.median(found) for rows, found in seconds.items()})
    return Guard(costs, max_draft=profile.max_draft)


def _pass_s(model: ScoringModel, rows: int) -> float:
    """Seconds of one pass over `rows` rows."""
    ids = as_ids([1] * (rows + 1))
    model.open("measure", ids)
    started = time.perf_counter()
    model.score([ScoreRequest("measure", ids, num_rows=rows)])
    seconds = time.perf_counter() - started
    model.close("measure")
    return seconds


def _eagle3_drafter(profile: Profile, config: Eagle3Drafter, features: "FeatureSource") -> Drafter:
    from serving.models.eagle3_lm import load_eagle3_lm
    from serving.models.loading import LoadOptions

    engine = profile.engine
    options = LoadOptions(
        role="drafter", dtype=profile.target.dtype, num_rows=engine.max_sessions, max_length=engine.max_length,
        prefill_chunk=engine.prefill_chunk, vocab_size=0, max_draft=config.max_draft,
        with_logsumexp=config.min_confidence > 0,
    )  # fmt: skip
    model = load_eagle3_lm(config.model, target=profile.target.model, features=features, options=options)
    return ModelDrafterRole(
        model, max_length=engine.max_length, min_confidence=config.min_confidence, is_coupled=config.coupled,
        source="eagle3",
    )  # fmt: skip


def _model_drafter(profile: Profile, config: ModelDrafter, tokenizer: ChatTokenizer) -> Drafter:
    from serving.models.draft_lm import draft_base, is_draft_lm
    from serving.models.loading import LoadOptions, load_packed_lm, read_config

    whole = draft_base(config.model) if is_draft_lm(config.model) else config.model
    if whole != profile.target.model:
        check_same_vocabulary(target=tokenizer, drafter=ChatTokenizer.load(whole))
    context = getattr(read_config(config.model).get_text_config(), "max_position_embeddings", None)
    limit = min(profile.engine.max_length, context or profile.engine.max_length)
    model = load_packed_lm(
        config.model,
        LoadOptions(
            role="drafter",
            dtype=profile.target.dtype,
            num_rows=profile.engine.max_sessions,
            max_length=limit,
            prefill_chunk=profile.engine.prefill_chunk,
            vocab_size=tokenizer.vocab_size,
            max_draft=config.max_draft,
            with_logsumexp=config.min_confidence > 0,
        ),
    )
    warm_up(model)
    return ModelDrafterRole(model, max_length=limit, min_confidence=config.min_confidence, is_coupled=config.coupled)
