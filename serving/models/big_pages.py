"""Memory for what every pass reads, in pages of two megabytes where the system gives them to those who ask.

A pass reads weights and caches of hundreds of megabytes from end to end. In pages of four kilobytes each of them has to
be looked up in tables that no longer fit in cache, and the processor's own prefetching stops at each one's end.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

_CHUNK = 32 << 20
_LINE = 64


class BigPages:
    """Tensors in main memory, side by side in chunks; a chunk is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0
        self._lock = Lock()

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor whose content is not defined, at the start of a cache line. Memory is taken as it is touched."""
        count = math.prod(size)
        if count == 0:
            return torch.empty(tuple(size), dtype=dtype)
        chunk, offset = self._reserve(count * dtype.itemsize)
        return torch.frombuffer(chunk, dtype=dtype, count=count, offset=offset).view(tuple(size))

    def _reserve(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        with self._lock:
            if self._chunk is None or self._used + num_bytes > len(self._chunk):
                self._chunk, self._used = _new_chunk(max(num_bytes, _CHUNK)), 0
            offset = self._used
            self._used += -(-num_bytes // _LINE) * _LINE
            return self._chunk, offset


def _new_chunk(num_bytes: int) -> mmap.mmap:
    chunk = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk
