"""Wiring of VIA-SD: the slim verifier of a profile, in place or alone, and the three tiers around it. No Ray here."""

from serving.build_drafter import warm_up
from serving.config import Profile, ViaVerifier
from serving.config_mask import LayerMask, read_mask
from serving.models.digest import model_digest
from serving.models.loading import LoadOptions, load_packed_lm, read_config
from serving.models.packed_lm import PackedLM
from serving.models.slim import SeededSlim, slim_in_place
from serving.models.tokenizer import ChatTokenizer
from serving.protocols import RemoteModel, RollbackModel
from serving.rules.via import ViaGates
from serving.verifiers.via import ViaVerifier as ViaVerifierRole


def build_via(profile: Profile, config: ViaVerifier, *, full: PackedLM, slim: RemoteModel | None) -> ViaVerifierRole:
    """Three tiers; without a remote `slim` it runs in place, on the weights of `full`."""
    gates = gates_of(config)
    if slim is None:
        return ViaVerifierRole(slim=_in_place(profile, config, full), full=full, gates=gates)
    return ViaVerifierRole(slim=slim, full=full, gates=gates, is_degraded=lambda: slim.degraded)


def build_slim(profile: Profile, config: ViaVerifier) -> RollbackModel:
    """The slim verifier alone, warmed up: only the kept layers are loaded."""
    slim = load_packed_lm(
        profile.target.model,
        LoadOptions(
            role="slim",
            dtype=profile.target.dtype,
            num_rows=profile.engine.max_sessions,
            max_length=profile.engine.max_length,
            prefill_chunk=profile.engine.prefill_chunk,
            vocab_size=ChatTokenizer.load(profile.target.model).vocab_size,
            max_draft=profile.max_draft,
            with_logsumexp=True,
            kept=mask_of(profile, config).kept,
        ),
    )
    warm_up(slim)
    return slim


def mask_of(profile: Profile, config: ViaVerifier) -> LayerMask:
    """The mask of a profile, its file read only where none is pinned. Raises ConfigError if it is for another model."""
    mask, target = config.layers or read_mask(config.mask), profile.target.model
    digest = None if mask.digest is None else model_digest(target)  # the first one reads a whole checkpoint
    mask.check(target, read_config(target).get_text_config().num_hidden_layers, digest=digest)
    return mask


def gates_of(config: ViaVerifier) -> ViaGates:
    """The thresholds of a profile as the rule takes them."""
    return ViaGates(
        theta_accept=config.theta_accept,
        theta_escalate=config.theta_escalate,
        min_confidence=config.min_confidence,
        max_unverified=config.max_unverified,
        has_bonus=config.bonus == "slim",
        escalates_stops=config.escalate_stop_tokens,
    )


def _in_place(profile: Profile, config: ViaVerifier, full: PackedLM) -> RollbackModel:
    kept = mask_of(profile, config).kept
    slim = slim_in_place(full, kept)
    warm_up(slim)
    return SeededSlim(slim, full, kept) if config.seed_from_full else slim
