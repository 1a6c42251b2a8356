"""The acceptance rules of a profile: strict, and the lossy ones with what bounds them."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator


class Frozen(BaseModel):
    """No type is taken for another, as in requests: integers may be floats, booleans and strings are no numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="strings")


class Calibration(Frozen):
    """What a rule was calibrated on: the shares of first mismatches by regret, and from how many.

    `shares` has an entry for each of the NUM_BINS of `serving.memory.drift`: served traffic is compared with them.
    """

    num_mismatches: int = Field(ge=1)
    shares: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...] = Field(min_length=11, max_length=11, strict=False)
    provenance: str = Field(default="", max_length=2000)

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if abs(sum(self.shares) - 1.0) > 0.01:
            raise ValueError(f"shares must add up to 1, got {sum(self.shares):.3f}")
        return self


class StrictRule(Frozen):
    """Accept a draft token iff it is the token the target itself emits: lossless."""

    kind: Literal["strict"] = "strict"

    @property
    def is_lossless(self) -> bool:
        return True


class AsdControls(Frozen):
    """ASD (arXiv 2608.03447), defaults as published: B nats a request, gate g on r / q, M exceptions a block."""

    budget: float = Field(default=8.0, ge=0.0, le=1e6, description="B: regret in nats that one request may spend")
    gate: float = Field(default=0.25, ge=0.0, le=1e3, description="g: nats of regret for each token it may save")
    max_exceptions: int = Field(default=2, ge=0, le=64, description="M: accepted mismatches of one block")
    q: Literal["remaining", "normalised"] = "remaining"
    q_cap: int = Field(default=16, ge=1, le=64, description="the most that q may be, however long the draft")
    relax_stop_tokens: bool = Field(default=False, description="let a stop token be an exception")

    @property
    def has_empty_purse(self) -> bool:
        """Whether no exception can ever be paid for."""
        return self.budget == 0.0 or self.max_exceptions == 0

    @property
    def has_shut_gate(self) -> bool:
        """Whether no mismatch passes ASD's test."""
        return self.gate == 0.0

    @model_validator(mode="after")
    def _budget_can_be_spent(self) -> Self:
        if self.budget > 0.0 and self.max_exceptions == 0:
            raise ValueError(
                f"budget is {self.budget:g}, but max_exceptions is 0, so none of it could be spent; set max_exceptions "
                "to 1 or more, or budget to 0"
            )
        return self


class CsdControls(Frozen):
    """CSD (arXiv 2604.13634), defaults as published: pairs seen more than λ times, p(draft) >= τ p(target)."""

    count_above: float = Field(default=6.0, ge=-1.0, description="λ: pairs seen more often are nominated; .inf: none")
    min_ratio: float = Field(default=0.01, ge=0.0, le=2.0, description="τ: above 1 nothing passes, 0 lets all pass")
    memory: Literal["frozen", "online"] = "frozen"
    table: str | None = Field(default=None, description="Parquet of calibrated counts, relative to the profile's file")
    table_hash: str | None = Field(default=None, pattern="^[0-9a-f]{16}$", description="what the counts must hash to")
    store: str | None = Field(default=None, description="Parquet of an online memory, beside it too; default: cache")
    max_pairs: int = Field(default=65_536, ge=1, le=4_194_304, description="pairs one tenant's online memory may hold")

    @property
    def nominates_nothing(self) -> bool:
        """Whether no mismatch passes CSD's tests."""
        return self.count_above == float("inf") or self.min_ratio > 1.0

    @field_validator("table", "store")
    @classmethod
    def _beside_the_profile(cls, value: str | None, info: ValidationInfo) -> str | None:
        folder = (info.context or {}).get("folder")
        return str(Path(folder) / value) if value and folder else value

    @model_validator(mode="after")
    def _table_is_pinned(self) -> Self:
        if (self.table is None) != (self.table_hash is None):
            raise ValueError("table and table_hash belong together: the counts are part of what a profile is")
        return self


class AsdRule(AsdControls):
    """The summed regret of a request is bounded by `budget`."""

    kind: Literal["asd"] = "asd"
    calibration: Calibration | None = None

    @property
    def is_lossless(self) -> bool:
        return self.has_empty_purse or self.has_shut_gate


class CsdRule(CsdControls):
    """Each exception is bounded by `min_ratio`; their sum is not."""

    kind: Literal["csd"] = "csd"
    calibration: Calibration | None = None

    @property
    def is_lossless(self) -> bool:
        return self.nominates_nothing


class AsdCsdRule(AsdControls, CsdControls):
    """`and`: CSD nominates, ASD pays. `or`: either test will do, and is paid for. Bounded as ASD is."""

    kind: Literal["asd-csd"] = "asd-csd"
    combine: Literal["and", "or"] = "and"
    calibration: Calibration | None = None

    @property
    def is_lossless(self) -> bool:
        shut = (self.has_shut_gate, self.nominates_nothing)
        return self.has_empty_purse or (any(shut) if self.combine == "and" else all(shut))


RuleConfig = Annotated[StrictRule | AsdRule | CsdRule | AsdCsdRule, Field(discriminator="kind")]
