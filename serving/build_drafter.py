"""The drafter of a profile, in the process that asks for it. Torch is imported only where a model is loaded."""

from typing import TYPE_CHECKING

from serving.config import (
    Eagle3Drafter,
    HybridDrafter,
    ModelDrafter,
    NoDrafter,
    Profile,
    RuleChooser,
    SuffixDrafter,
)
from serving.drafters.chooser import Chooser, YieldChooser
from serving.drafters.chooser import RuleChooser as RuleChooserRole
from serving.drafters.hybrid import HybridDrafter as HybridDrafterRole
from serving.drafters.model import ModelDrafter as ModelDrafterRole
from serving.drafters.ready import PlainDrafter
from serving.drafters.suffix import SuffixDrafter as SuffixDrafterRole
from serving.drafters.token_kinds import TokenKinds, token_kinds
from serving.drafters.yield_kernel import NativeYields, best_yields
from serving.drafters.yield_predictor import YieldPredictor
from serving.errors import ConfigError
from serving.memory.lookup import JudgeFields, best_lookup
from serving.memory.suffix import SuffixCache
from serving.models.tokenizer import ChatTokenizer
from serving.models.vocabulary import check_same_vocabulary
from serving.protocols import Drafter, ScoreRequest, ScoringModel
from serving.types import as_ids

if TYPE_CHECKING:
    from serving.models.eagle3_lm import FeatureSource
    from serving.models.shipped_features import ShippedFeatures


def build_drafter(
    profile: Profile,
    *,
    tokenizer: ChatTokenizer | None = None,
    features: "FeatureSource | None" = None,
    chooser: Chooser | None = None,
) -> Drafter:
    """The drafter of `profile`, warmed up. Raises ConfigError where it cannot draft for the target.

    `features` are the target's, for a drafter that reads them; `chooser` chooses in place of a hybrid's own.
    """
    match profile.drafter:
        case NoDrafter():
            return PlainDrafter()
        case SuffixDrafter() as config:
            return SuffixDrafterRole(suffix_cache(config))
        case ModelDrafter() | Eagle3Drafter() as config:
            return _model_arm(profile, config, tokenizer, features)
        case HybridDrafter() as config:
            tokenizer = tokenizer or ChatTokenizer.load(profile.target.model)
            # First: its artefact may be missing, and models take long to load.
            chooser = chooser or _chooser(config, tokenizer)
            return HybridDrafterRole(
                SuffixDrafterRole(suffix_cache(config.cache, judge=_judge(chooser))),
                _model_arm(profile, config.model, tokenizer, features),
                chooser,
                model_max_draft=config.model.max_draft,
            )


def shipped_features(profile: Profile) -> "ShippedFeatures | None":
    """Where a Target's features are kept on the drafter's side, for a drafter that reads them."""
    drafter = _feature_reader(profile)
    if drafter is None:
        return None
    from serving.models.eagle3 import NUM_FEATURES
    from serving.models.eagle3_checkpoint import read_eagle3_config
    from serving.models.shipped_features import ShippedFeatures

    return ShippedFeatures(NUM_FEATURES * read_eagle3_config(drafter.model).target_hidden_size)


def _feature_reader(profile: Profile) -> Eagle3Drafter | None:
    drafter = profile.drafter.model if isinstance(profile.drafter, HybridDrafter) else profile.drafter
    return drafter if isinstance(drafter, Eagle3Drafter) else None


def suffix_cache(config: SuffixDrafter, *, judge: JudgeFields | None = None) -> SuffixCache:
    """An empty suffix cache; `judge` is asked about every match."""
    return SuffixCache(
        max_depth=config.max_depth,
        max_draft=config.max_draft,
        factor=config.factor,
        offset=config.offset,
        min_prob=config.min_prob,
        max_tokens=config.max_tokens,
        lookup=best_lookup(judge),
    )


def feature_layers(profile: Profile) -> tuple[int, ...]:
    """Target layers whose inputs the profile's drafter reads; none for most drafters."""
    drafter = _feature_reader(profile)
    if drafter is None:
        return ()
    from serving.models.eagle3_checkpoint import read_eagle3_config
    from serving.models.loading import read_config

    target, head = read_config(profile.target.model).get_text_config(), read_eagle3_config(drafter.model)
    if head.target_hidden_size != target.hidden_size:
        raise ConfigError(
            f"drafter.model: {drafter.model!r} reads features of {head.target_hidden_size} numbers, "
            f"{profile.target.model!r} has {target.hidden_size}: it was trained for another target"
        )
    return head.layers_of(target.num_hidden_layers)


def warm_up(model: ScoringModel, *, num_rows: int = 5) -> None:
    """Run the shapes that decoding will use once, so that the first request does not pay for them."""
    ids = as_ids([1] * (num_rows + 1))
    model.open("warm-up", ids)
    for rows in (1, num_rows):
        model.score([ScoreRequest("warm-up", ids, num_rows=rows)])
    model.close("warm-up")


def _chooser(config: HybridDrafter, tokenizer: ChatTokenizer) -> Chooser:
    match config.chooser:
        case RuleChooser(least_score=least_score):
            return RuleChooserRole(config.model.max_draft if least_score is None else least_score)
        case chosen:
            return YieldChooser(best_yields(YieldPredictor.load(chosen.predictor), kinds_of(tokenizer)), chosen.tau)


def _judge(chooser: Chooser) -> JudgeFields | None:
    """The predictor of `chooser`, where a look-up can ask it."""
    predictor = chooser.predictor if isinstance(chooser, YieldChooser) else None
    return predictor.judge if isinstance(predictor, NativeYields) else None


def kinds_of(tokenizer: ChatTokenizer) -> TokenKinds:
    """The kinds of every token of `tokenizer`."""
    return token_kinds(tokenizer.token_text(token) for token in range(tokenizer.vocab_size))


def _model_arm(
    profile: Profile,
    config: ModelDrafter | Eagle3Drafter,
    tokenizer: ChatTokenizer | None,
    features: "FeatureSource | None",
) -> Drafter:
    if isinstance(config, ModelDrafter):
        return _model_drafter(profile, config, tokenizer or ChatTokenizer.load(profile.target.model))
    if features is None:
        raise ConfigError("drafter.kind: 'eagle3' reads the target's features, and there is no target here")
    return _eagle3_drafter(profile, config, features)


def _eagle3_drafter(profile: Profile, config: Eagle3Drafter, features: "FeatureSource") -> Drafter:
    from serving.models.eagle3_load import load_eagle3_lm
    from serving.models.loading import LoadOptions

    engine = profile.engine
    options = LoadOptions(
        role="drafter", dtype=profile.target.dtype, num_rows=engine.max_sessions, max_length=engine.max_length,
        prefill_chunk=engine.prefill_chunk, vocab_size=0, max_draft=config.max_draft, with_logsumexp=True,
    )  # fmt: skip
    model = load_eagle3_lm(config.model, target=profile.target.model, features=features, options=options)
    return ModelDrafterRole(
        model, max_length=engine.max_length, min_confidence=config.min_confidence, is_coupled=config.coupled,
        source="eagle3", draft_all=model.draft,
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
            with_logsumexp=True,
        ),
    )
    warm_up(model)
    return ModelDrafterRole(model, max_length=limit, min_confidence=config.min_confidence, is_coupled=config.coupled)
