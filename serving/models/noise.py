"""Counter-based Gumbel noise: a pure function of (seed, position, token id), whatever the batch.

argmax(logits / T + noise) is an exact sample of softmax(logits / T), and every role that asks for the same
position gets the same noise.
"""

import torch
from torch import Tensor

_STEP = -7046029254386353131  # 0x9E3779B97F4A7C15, the golden-ratio increment of splitmix64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def gumbel(seed: int, position: int, vocab_size: int) -> Tensor:
    """float32[vocab_size] of standard Gumbel noise for the token at `position`."""
    stream = _mix(_mix(torch.tensor([seed], dtype=torch.int64)) + position)
    bits = _mix(stream + torch.arange(vocab_size, dtype=torch.int64) * _STEP)
    uniform = (_shift(bits, 40).float() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser; int64 arithmetic wraps like uint64."""
    x = x + _STEP
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical (zero-filling) right shift."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
