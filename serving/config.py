"""Profiles: the unit that is tuned, certified and served. Frozen, every number bounded, unknown keys refused."""

import hashlib
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from serving.config_mask import LayerMask, mask_in, read_mask
from serving.config_rules import Frozen as _Frozen
from serving.config_rules import RuleConfig, StrictRule
from serving.errors import ConfigError, one_line

PROFILES_DIR = Path(__file__).parent / "assets" / "profiles"


class ModelConfig(_Frozen):
    """A model: the embedded default by name, a Hub id, a local folder, or a GGUF file."""

    model: str = "smollm2-135m-instruct"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class NoDrafter(_Frozen):
    """Plain decoding: every round has K = 0."""

    kind: Literal["none"] = "none"

    @property
    def max_draft(self) -> int:
        return 0


class SuffixDrafter(_Frozen):
    """Suffix cache (SuffixDecoding), defaults as published; `max_draft` bounds one draft."""

    kind: Literal["suffix"] = "suffix"
    max_draft: int = Field(default=16, ge=1, le=64)
    max_depth: int = Field(default=64, ge=1, le=64)
    factor: float = Field(default=1.0, ge=0.0, le=8.0)
    offset: float = Field(default=0.0, ge=-8.0, le=8.0)
    min_prob: float = Field(default=0.1, ge=0.0, le=1.0)
    max_tokens: int = Field(default=1_000_000, ge=0, le=16_000_000)


class _ChainDrafter(_Frozen):
    """What drafts token by token."""

    max_draft: int = Field(default=4, ge=1, le=20)
    min_confidence: float = Field(default=0.0, ge=0.0, lt=1.0)
    coupled: bool = Field(default=True, description="draw with the target's noise where a request samples")


class ModelDrafter(_ChainDrafter):
    """An independent draft LM: one made by `train-drafter`, or any causal LM with the target's tokenizer."""

    kind: Literal["model"] = "model"
    model: str = "smollm2-135m-drafter"


class Eagle3Drafter(_ChainDrafter):
    """An EAGLE-3 head, which reads the target's features: one made by `train-eagle3`, or a public checkpoint."""

    kind: Literal["eagle3"] = "eagle3"
    model: str = "smollm2-135m-eagle3"


# Drafters that cost passes of a model: what a hybrid may fall back on.
ModelArm: TypeAlias = Annotated[ModelDrafter | Eagle3Drafter, Field(discriminator="kind")]


class YieldChooser(_Frozen):
    """The cache's draft where its predicted yield exceeds `tau` tokens; .inf is model-only, -.inf cache-only.

    `measured`: where it would emit more in its time than the model's draft, by what the guard has measured in this
    session. Without a guard that is any yield above 0.
    """

    kind: Literal["yield"] = "yield"
    predictor: str = Field(default="smollm2-135m-yield", description="shipped name, or folder made by train-yield")
    tau: Annotated[float, Field(allow_inf_nan=True)] | Literal["measured"] = 6.0

    @field_validator("tau")
    @classmethod
    def _is_a_number(cls, tau: float | Literal["measured"]) -> float | Literal["measured"]:
        if tau != tau:
            raise ValueError("must be a number, .inf or -.inf")
        return tau


class RuleChooser(_Frozen):
    """The cache's draft where the sum of its path probabilities reaches `least_score`; None: the model's max_draft."""

    kind: Literal["rule"] = "rule"
    least_score: float | None = Field(default=None, ge=0.0, le=64.0)


class HybridDrafter(_Frozen):
    """Cache or model, chosen for each draft (HVD)."""

    kind: Literal["hybrid"] = "hybrid"
    cache: SuffixDrafter = SuffixDrafter()
    model: ModelArm = ModelDrafter()
    chooser: Annotated[YieldChooser | RuleChooser, Field(discriminator="kind")] = YieldChooser()

    @property
    def max_draft(self) -> int:
        return max(self.cache.max_draft, self.model.max_draft)


class FullVerifier(_Frozen):
    """Every block is scored by the full target."""

    kind: Literal["full"] = "full"


class ViaVerifier(_Frozen):
    """VIA-SD: a slim verifier decides the easy tokens, the full target the rest; no bound on what it changes.

    `mask` says which layers the slim verifier keeps: a shipped one by name, or a file that `search via` wrote, relative
    to the profile's. `layers` is what it says, read when the profile is loaded: a file that changes later changes no
    role.
    """

    kind: Literal["via"] = "via"
    mask: str = "smollm2-135m-via"
    layers: LayerMask | None = None
    theta_accept: float = Field(default=0.7, gt=0.0, le=2.0, description="keep a token (tier A); above 1: never")
    theta_escalate: float = Field(default=0.5, gt=0.0, le=2.0, description="rewrite it (tier B); above 1: never")
    min_confidence: float = Field(default=0.5, ge=0.0, le=1.0, description="what tier B asks of its own token")
    max_unverified: int = Field(default=32, ge=0, le=4096, description="tokens that no full pass has seen, at most")
    bonus: Literal["none", "slim"] = "none"
    escalate_stop_tokens: bool = Field(default=True, description="stop tokens, not strings, need the target's word")
    seed_from_full: bool = Field(default=False, description="colocated only: start from the target's KV")

    @field_validator("mask")
    @classmethod
    def _beside_the_profile(cls, value: str, info: ValidationInfo) -> str:
        folder = (info.context or {}).get("folder")
        return mask_in(Path(folder), value) if folder else value

    @model_validator(mode="after")
    def _thresholds_in_order(self) -> Self:
        if self.theta_accept < self.theta_escalate:
            raise ValueError(
                f"theta_accept ({self.theta_accept:g}) must be at least theta_escalate ({self.theta_escalate:g})"
            )
        return self


class EngineConfig(_Frozen):
    """One engine: how many sequences at once, how long each may grow, how prompts are fed."""

    max_sessions: int = Field(default=16, ge=1, le=512)
    max_length: int = Field(default=2048, ge=2, le=1_048_576, description="prompt + new tokens of one sequence")
    prefill_chunk: int = Field(default=128, ge=1, le=16_384, description="prompt tokens fed in one round")
    max_queued: int = Field(default=256, ge=0, le=100_000)
    draft_timeout_s: float = Field(default=2.0, gt=0.0, le=60.0)
    stream_period_ms: float | None = Field(
        default=None,
        ge=0.0,
        le=10_000.0,
        description="least time between pieces of a stream; None: 25 for each stream on a CPU, 100 to 250; else 0",
    )
    guard: bool = Field(default=True, description="let measured costs lower K, to 0 where drafts do not pay")


DrafterConfig = Annotated[
    NoDrafter | SuffixDrafter | ModelDrafter | Eagle3Drafter | HybridDrafter, Field(discriminator="kind")
]
VerifierConfig = Annotated[FullVerifier | ViaVerifier, Field(discriminator="kind")]


class Profile(_Frozen):
    """Target, drafter, verifier and rule with their controls."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    target: ModelConfig = ModelConfig()
    drafter: DrafterConfig = NoDrafter()
    verifier: VerifierConfig = FullVerifier()
    rule: RuleConfig = StrictRule()
    engine: EngineConfig = EngineConfig()
    placement: Literal["separate", "colocated"] = "separate"
    allow_uncertified: bool = Field(default=False, description="serve a lossy profile without a certificate")

    @model_validator(mode="after")
    def _verifier_fits(self) -> Self:
        if isinstance(self.verifier, ViaVerifier) and self.max_draft == 0:
            raise ValueError("verifier via judges drafts, but drafter 'none' makes none; choose a drafter")
        is_seeded = isinstance(self.verifier, ViaVerifier) and self.verifier.seed_from_full
        if is_seeded and self.placement != "colocated":
            raise ValueError("verifier.seed_from_full needs `placement: colocated`: KV does not travel between actors")
        return self

    @property
    def max_draft(self) -> int:
        """The largest K of any round; a request may ask for less."""
        return self.drafter.max_draft

    @property
    def is_lossless(self) -> bool:
        """Whether every answer is the target's own, token for token."""
        return self.rule.is_lossless and isinstance(self.verifier, FullVerifier)

    @property
    def hash(self) -> str:
        """16 hex digits that name what judges tokens: models, rule, verifier and the drafter with its largest K.

        Counts and kept layers by content, files not by path. Not the engine with its guard, nor where roles run: under
        a lossy rule how much is drafted may change a text, its bound never. Nor name, consent or calibration record.
        Raises ConfigError for a mask that cannot be read.
        """
        content = pinned(self).model_dump_json(
            include={"target", "drafter", "verifier", "rule"},
            exclude={"rule": {"table", "store", "calibration"}, "verifier": {"mask": True, "layers": {"digest"}}},
        )
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @model_validator(mode="after")
    def _rule_has_drafts(self) -> Self:
        if self.rule.kind != "strict" and self.max_draft == 0:
            raise ValueError(f"rule {self.rule.kind!r} judges drafts, but drafter 'none' makes none; choose a drafter")
        return self


def check_servable(profile: Profile) -> None:
    """Raise ConfigError for a lossy profile that nothing vouches for and whose file does not ask for that."""
    if not profile.is_lossless and not profile.allow_uncertified:
        lossy = f"verifier {profile.verifier.kind!r}" if profile.rule.is_lossless else f"rule {profile.rule.kind!r}"
        raise ConfigError(
            f"profile {profile.name!r} is lossy ({lossy}) and has no certificate; set "
            "`allow_uncertified: true` in its file to serve it all the same, or `rule: {kind: strict}` with "
            "`verifier: {kind: full}`"
        )


def profile_names() -> list[str]:
    """Names of the profiles that ship."""
    return sorted(path.stem for path in PROFILES_DIR.glob("*.yaml"))


def load_profile(name_or_path: str) -> Profile:
    """A shipped profile by name, or any YAML file by path. Raises ConfigError in one line."""
    path = PROFILES_DIR / f"{name_or_path}.yaml"
    if not path.is_file():
        path = Path(name_or_path)
    if not path.is_file():
        shipped = ", ".join(profile_names())
        raise ConfigError(f"profile: {name_or_path!r} is neither a shipped profile ({shipped}) nor a file")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        profile = Profile.model_validate(values, context={"folder": path.parent.resolve()})
    except UnicodeDecodeError:
        raise ConfigError(f"profile {path}: is no UTF-8 text") from None
    except (ValidationError, yaml.YAMLError) as error:
        raise ConfigError(f"profile {path}: {one_line(error)}") from None
    return pinned(profile)


def pinned(profile: Profile) -> Profile:
    """`profile` with the layers that its mask keeps. Raises ConfigError for a mask that cannot be read."""
    verifier = profile.verifier
    if not isinstance(verifier, ViaVerifier) or verifier.layers is not None:
        return profile
    return profile.model_copy(update={"verifier": verifier.model_copy(update={"layers": read_mask(verifier.mask)})})
