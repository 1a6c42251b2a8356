"""Reductions over rows of logits: by the native kernels on a CPU, by torch elsewhere.

Torch would start its OpenMP threads for them, which then spin on the cores that the kernels' own threads need.
"""

import torch
from torch import Tensor

from serving.models.native import NativeKernels, load_native


def log_sum_exp(rows: Tensor) -> Tensor:
    """float32 [R] of rows[R, V]."""
    kernels = kernels_for(rows)
    return rows.logsumexp(dim=-1) if kernels is None else kernels.log_sum_exp(rows)


def kernels_for(rows: Tensor) -> NativeKernels | None:
    """The native kernels where they can read `rows`."""
    fits = rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.stride(-1) == 1
    return load_native() if fits else None
