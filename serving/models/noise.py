"""Counter-based Gumbel noise: a pure function of (seed, position, token id), whatever the batch.

argmax(logits / T + noise) is an exact sample of softmax(logits / T), and every role that asks for the same
position gets the same noise. `kernels/sampling.h` computes the same bits; its logarithms may differ in the last place.
"""

from typing import TypeAlias

import torch
from torch import Tensor

_MASK_32, _MASK_64 = 2**32 - 1, 2**64 - 1
# Below this a series is more precise than the logarithm of a number close to one.
_SMALL = 2.0**-6

Keys: TypeAlias = tuple[int, int]


def noise_keys(seed: int, position: int) -> Keys:
    """Two 32-bit numbers for the token at `position` of a sequence sampled with `seed` (any 64-bit number)."""
    mixed = _mix(_mix(seed & _MASK_64) + position)
    return mixed >> 32, mixed & _MASK_32


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """float32[n, V] noise, standard Gumbel: a row for each pair of `keys` i64[n, 2], for the token ids i64[V]."""
    first, second = keys[:, :1], keys[:, 1:]
    hashed = (ids * 0x9E3779B1 + first) & _MASK_32
    hashed = ((hashed ^ (hashed >> 16)) * 0x21F0AAAD) & _MASK_32
    hashed = (hashed ^ (hashed >> 15)) ^ second
    hashed = (hashed * 0xD35A2D97) & _MASK_32
    hashed = hashed ^ (hashed >> 15)
    uniform = ((hashed >> 1).float() + 0.5) * 2.0**-31
    series = uniform + uniform * uniform * (0.5 + uniform * (1 / 3 + uniform * 0.25))
    exponential = torch.where(uniform < _SMALL, series, -torch.log((1 - uniform).clamp(min=2.0**-24)))
    return -torch.log(exponential)


def _mix(x: int) -> int:
    """splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)
