"""Which layers of a target a slim verifier keeps: the file that `search via` writes. No torch.

JSON with `model`, `num_layers` and `kept` (original indices, ascending); what else it holds is provenance.
"""

import json
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serving.errors import ConfigError, one_line

ASSETS_DIR = Path(__file__).parent / "assets"


class LayerMask(BaseModel):
    """`kept` layers of the `num_layers` of `model`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    model: str = Field(min_length=1)
    num_layers: int = Field(ge=1, le=4096)
    kept: tuple[int, ...] = Field(min_length=1, strict=False)

    @model_validator(mode="after")
    def _kept_in_order(self) -> Self:
        if list(self.kept) != sorted(set(self.kept)) or self.kept[0] < 0 or self.kept[-1] >= self.num_layers:
            raise ValueError(f"kept must be ascending layer indices within 0..{self.num_layers - 1}")
        return self

    def check(self, model: str, num_layers: int) -> None:
        """Raises ConfigError unless the mask is for `model` with so many layers."""
        if (self.model, self.num_layers) != (model, num_layers):
            raise ConfigError(
                f"verifier.mask: was searched for {self.model!r} with {self.num_layers} layers, "
                f"the target is {model!r} with {num_layers}; search again"
            )

    @property
    def skipped(self) -> tuple[int, ...]:
        return tuple(index for index in range(self.num_layers) if index not in self.kept)


def read_mask(name_or_path: str) -> LayerMask:
    """A shipped mask by name, or a JSON file. Raises ConfigError in one line."""
    path = ASSETS_DIR / f"{name_or_path}.json"
    if not path.is_file():
        path = Path(name_or_path).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"verifier.mask: {name_or_path!r} is neither a shipped mask nor a file; `search via` makes one"
        )
    try:
        return LayerMask.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ConfigError(f"verifier.mask {path}: {one_line(error)}") from None
    except ValueError as error:
        raise ConfigError(f"verifier.mask {path}: is no JSON: {error}") from None
