"""Which layers of a target a slim verifier keeps: the file that `search via` writes. No torch.

JSON with `model`, `num_layers`, `kept` (original indices, ascending) and, if there, `digest`, which names
the model by content; what else it holds is provenance.
"""

import json
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serving.errors import ConfigError, one_line

ASSETS_DIR = Path(__file__).parent / "assets"


class LayerMask(BaseModel):
    """`kept` layers of the `num_layers` of `model`, the first and the last among them where others lie between."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    model: str = Field(min_length=1)
    num_layers: int = Field(ge=1, le=4096)
    kept: tuple[int, ...] = Field(min_length=1, strict=False)
    digest: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _kept_in_order(self) -> Self:
        if list(self.kept) != sorted(set(self.kept)) or self.kept[0] < 0 or self.kept[-1] >= self.num_layers:
            raise ValueError(f"kept must be ascending layer indices within 0..{self.num_layers - 1}")
        if self.num_layers > 2 and (self.kept[0], self.kept[-1]) != (0, self.num_layers - 1):
            raise ValueError(f"kept must hold the first and the last layer, 0 and {self.num_layers - 1}")
        return self

    def check(self, model: str, num_layers: int, *, digest: str | None = None) -> None:
        """Raises ConfigError unless the mask is for `model` with so many layers.

        By content where both digests are there, by name otherwise.
        """
        pair = (
            f"verifier.mask: was searched for {self.model!r} with {self.num_layers} layers, "
            f"the target is {model!r} with {num_layers}"
        )
        if self.num_layers != num_layers:
            raise ConfigError(f"{pair}; search again")
        if self.digest is None or digest is None:
            if self.model != model:
                raise ConfigError(f"{pair}; search again, or name the same model as the search did")
        elif self.digest != digest:
            raise ConfigError(f"{pair} and other weights; search again")

    @property
    def skipped(self) -> tuple[int, ...]:
        return tuple(index for index in range(self.num_layers) if index not in self.kept)


def mask_in(folder: Path, name_or_path: str) -> str:
    """What a file in `folder` calls a mask, as `read_mask` takes it: a shipped name, or a path from that folder."""
    return name_or_path if _shipped(name_or_path).is_file() else str(folder / Path(name_or_path).expanduser())


def read_mask(name_or_path: str) -> LayerMask:
    """A shipped mask by name, or a JSON file. Raises ConfigError in one line."""
    path = _shipped(name_or_path)
    if not path.is_file():
        path = Path(name_or_path).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"verifier.mask: {name_or_path!r} is neither a shipped mask nor a file (there is no {path.absolute()}); "
            "`search via` makes one"
        )
    try:
        return LayerMask.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ConfigError(f"verifier.mask {path}: {one_line(error)}") from None
    except ValueError as error:
        raise ConfigError(f"verifier.mask {path}: is no JSON: {error}") from None


def _shipped(name: str) -> Path:
    return ASSETS_DIR / f"{name}.json"
