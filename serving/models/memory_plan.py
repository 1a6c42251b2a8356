"""What a process will take, before it takes it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self
from weakref import WeakKeyDictionary

import torch

from serving.errors import MemoryPlanError

_MIB = 1 << 20
# Kept free for the interpreter, the allocator and everybody else.
_RESERVE = 0.1


@dataclass(frozen=True)
class PlannedItem:
    """One line of the plan: whose memory, for what, how many bytes."""

    role: str
    purpose: str
    num_bytes: int


class Rows(Protocol):
    """Memory that is asked for in one piece; a CPU's is taken from the machine row by row, as each is first used."""

    @property
    def untouched_bytes(self) -> int:
        """Of the rows that nothing has used yet."""
        ...


# Of every role in this process that has its rows: its name, and the workspace that it takes in each pass.
_reserved: WeakKeyDictionary[Rows, tuple[str, int]] = WeakKeyDictionary()


def reserve(rows: Rows, role: str, *, workspace: int = 0) -> None:
    """Let later plans of this process count what `rows` and the passes over them will take, while `rows` live."""
    _reserved[rows] = (role, workspace)


@dataclass(frozen=True)
class MemoryPlan:
    """Weights, KV rows and workspace of every role in one process against what is available (bytes)."""

    items: tuple[PlannedItem, ...]
    available: int

    @classmethod
    def on(cls, device: torch.device, items: Iterable[PlannedItem]) -> Self:
        """`items` beside what earlier roles have reserved. A GPU's memory is taken as it is asked for."""
        earlier = [] if device.type == "cuda" else list(_reserved.items())
        reserved = (PlannedItem(role, "reserved", rows.untouched_bytes + size) for rows, (role, size) in earlier)
        return cls((*reserved, *items), available_bytes(device))

    @property
    def needed(self) -> int:
        return sum(item.num_bytes for item in self.items)

    def bytes_for(self, purpose: str) -> int:
        """Bytes of all items for `purpose`."""
        return sum(item.num_bytes for item in self.items if item.purpose == purpose)

    @property
    def fits(self) -> bool:
        return self.needed <= self.available * (1 - _RESERVE)

    def check(self) -> None:
        """Raise MemoryPlanError with the whole table if it does not fit."""
        if not self.fits:
            raise MemoryPlanError(
                f"the memory plan does not fit; lower engine.max_sessions or engine.max_length, or use bfloat16\n{self}"
            )

    def __str__(self) -> str:
        lines = [f"{i.role:<10} {i.purpose:<10} {i.num_bytes / _MIB:>10.1f} MiB" for i in self.items]
        lines.append(f"{'all':<10} {'needed':<10} {self.needed / _MIB:>10.1f} MiB")
        lines.append(f"{'machine':<10} {'available':<10} {self.available / _MIB:>10.1f} MiB")
        return "\n".join(lines)


def available_bytes(device: torch.device) -> int:
    """Free memory of the device; on a CPU what the kernel calls available, within the cgroup's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    if not info.is_file():
        return 1 << 62  # unknown here; nothing to refuse by
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(text) - int(used.read_text())))
    return free
