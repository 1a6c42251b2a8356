"""The yield predictor: how many tokens of a cache draft the target will accept.

HVD (arXiv 2606.01019): features -> 256 ReLU -> 256 ReLU -> 1, trained by `python -m jobs train-yield`. An artefact is a
folder of `predictor.npz` (mean, std and weights) and `predictor.json`, its card: feature names, provenance, figures.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.drafters.yield_features import FEATURES
from serving.errors import ConfigError
from serving.types import Floats

ASSETS = Path(__file__).parents[1] / "assets"
_ARRAYS = ("mean", "std", "w1", "b1", "w2", "b2", "w3", "b3")


@dataclass(frozen=True, eq=False)
class YieldPredictor:
    """Weights w[in, out] f32, biases f32; mean and std f32[F] of the features in training."""

    mean: Floats
    std: Floats
    w1: Floats
    b1: Floats
    w2: Floats
    b2: Floats
    w3: Floats
    b3: Floats

    @cached_property
    def digest(self) -> str:
        """Hex digits that name the weights."""
        return hashlib.sha256(b"".join(getattr(self, name).tobytes() for name in _ARRAYS)).hexdigest()

    def predict(self, rows: Floats) -> Floats:
        """f32[B] of feature rows f32[B, F]: tokens, not yet clamped."""
        weights, bias = self.first_layer
        hidden: Floats = rows @ weights
        hidden += bias
        np.maximum(hidden, 0.0, out=hidden)
        hidden = hidden @ widened(self.second_weights)
        hidden += self.b2
        np.maximum(hidden, 0.0, out=hidden)
        predicted: Floats = hidden @ self.w3 + self.b3
        return predicted[:, 0]

    @cached_property
    def first_layer(self) -> tuple[Floats, Floats]:
        """Weights and bias with the normalisation in them; rounded once."""
        scaled = self.w1 / self.std[:, None].astype(np.float64)
        bias = self.b1 - self.mean @ scaled
        return scaled.astype(np.float32), bias.astype(np.float32)

    @cached_property
    def second_weights(self) -> npt.NDArray[np.uint16]:
        """w2 rounded to bfloat16, as bits: it is most of what a prediction reads, from memory and not from a cache."""
        bits = self.w2.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    @classmethod
    def load(cls, name_or_folder: str) -> "YieldPredictor":
        """A shipped predictor by name, or a folder. Raises ConfigError in one line."""
        folder = ASSETS / name_or_folder
        folder = folder if folder.is_dir() else Path(name_or_folder)
        try:
            card = json.loads((folder / "predictor.json").read_text(encoding="utf-8"))
            with np.load(folder / "predictor.npz") as stored:
                arrays = {name: np.ascontiguousarray(stored[name], dtype=np.float32) for name in _ARRAYS}
        except (OSError, KeyError, ValueError) as error:
            raise ConfigError(f"predictor: {name_or_folder!r} holds no yield predictor: {error}") from None
        if tuple(card.get("features", ())) != FEATURES:
            raise ConfigError(f"predictor: {name_or_folder!r} was trained on other features; train it anew")
        return cls(**arrays)

    def save(self, folder: Path, card: dict[str, Any]) -> None:
        """Write the artefact; `card` gets the feature names."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, npt.NDArray[np.float32]] = {name: getattr(self, name) for name in _ARRAYS}
        np.savez_compressed(folder / "predictor.npz", allow_pickle=False, **arrays)
        text = json.dumps({"features": FEATURES, **card}, indent=2)
        (folder / "predictor.json").write_text(text + "\n", encoding="utf-8")


def widened(bits: npt.NDArray[np.uint16]) -> Floats:
    """bfloat16 numbers as float32, which has them all."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
