"""The run of several mask searches on equal budgets: what was asked, what it cost, and where to go on.

The log is the only truth: one JSON line a mask that was evaluated. A search that is started again asks the same
masks in the same order and finds the answers of those that are in the log.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from serving.errors import ConfigError
from tuning.dimr import Agreement
from tuning.masks import ARMS, Asking, Mask, Space, least_budget

_MOST_ATTEMPTS = 2
_HOPELESS = 3  # masks in a row that could not be judged: more of them would fare no better


@dataclass(frozen=True)
class Plan:
    """Each arm searches each size with at most `budget` masks. Raises ConfigError where an arm needs more."""

    num_layers: int
    sizes: Sequence[int]
    budget: int
    seed: int
    arms: Sequence[str] = tuple(ARMS)

    def __post_init__(self) -> None:
        for arm in self.arms:
            least = least_budget(arm, self.num_layers)
            if self.budget < least:
                raise ConfigError(
                    f"--budget: arm {arm!r} needs at least {least} masks on {self.num_layers} layers, got "
                    f"{self.budget}; raise it, or leave the arm out of --arms"
                )


class MaskLog:
    """Masks and their agreement with the target, on disk line by line; those that could not be judged, without one.

    `identity` names model and data. Raises ConfigError for a file that has another one. `seconds` is what the
    `num_evaluated` masks of all runs took, failed ones among them.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        self._known: dict[Mask, Agreement] = {}
        self.seconds = 0.0
        self.num_evaluated = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text and not text.endswith("\n"):  # the process was killed while it wrote a line
            path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
        lines = text[: text.rfind("\n") + 1].splitlines()
        if lines and json.loads(lines[0]) != {"identity": identity}:
            raise ConfigError(f"--out: {path} belongs to another model or other data; choose another folder")
        if not lines:
            self._append({"identity": identity})
        for line in lines[1:]:
            self._read(line)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, mask: Mask) -> Agreement | None:
        return self._known.get(mask)

    def add(self, mask: Mask, found: Agreement, seconds: float) -> None:
        self._known[mask] = found
        self._count(seconds)
        self._append({"skipped": mask, "seconds": seconds, **asdict(found)})

    def add_failed(self, mask: Mask, seconds: float) -> None:
        """For the record: a later run knows nothing of `mask` and asks it again."""
        self._count(seconds)
        self._append({"skipped": mask, "seconds": seconds, "failed": True})

    def _append(self, record: dict[str, object]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _read(self, line: str) -> None:
        record = json.loads(line)
        mask = tuple(record["skipped"])
        if "seconds" in record:
            self._count(record["seconds"])
        if math.isfinite(record.get("cost", math.inf)):
            self._known[mask] = Agreement(record["cost"], record["kl"], record["top1"])

    def _count(self, seconds: float) -> None:
        self.seconds += seconds
        self.num_evaluated += 1


@dataclass
class History:
    """One arm on one size: the masks of that size in the order they were asked, and their costs.

    Masks that could not be judged are no part of it, so there may be none. `final_costs` are those of its best masks on
    more data, where they were judged again.
    """

    arm: str
    space: Space
    masks: list[Mask] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    final_costs: dict[Mask, float] = field(default_factory=dict)

    def leaders(self, count: int) -> list[Mask]:
        """The `count` masks of least cost, the best first."""
        return sorted(self._costs, key=self._costs.__getitem__)[:count]

    @property
    def best(self) -> Mask:
        """The mask of least final cost, or of least cost where none was judged again."""
        return min(self.final_costs, key=self.final_costs.__getitem__) if self.final_costs else self.leaders(1)[0]

    @property
    def _costs(self) -> dict[Mask, float]:
        return dict(zip(self.masks, self.costs, strict=True))

    @property
    def running_best(self) -> list[float]:
        found, least = [], math.inf
        for cost in self.costs:
            least = min(least, cost)
            found.append(least)
        return found


class MaskSearch:
    """Asks one mask after the other: `ask` until it is None, `tell` what it cost, or `fail` it.

    An arm hears of a mask that failed as of the costliest there is.
    """

    def __init__(self, plan: Plan, log: MaskLog, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self.histories: list[History] = []
        self.num_asked = 0
        self._pending: Mask | None = None
        self._asked_s = 0.0
        self._num_attempts = 0
        self._failed: set[Mask] = set()
        self._num_failed_in_a_row = 0
        self._masks = self._all(plan)

    @property
    def is_hopeless(self) -> bool:
        """Whether so many masks in a row failed that something else must be wrong."""
        return self._num_failed_in_a_row >= _HOPELESS

    def ask(self) -> Mask | None:
        """The next mask that no one knows the cost of; the same one until it is told, or has failed twice."""
        if self._pending is None:
            self._pending = next(self._masks, None)
            self._asked_s = self._clock()
            self._num_attempts = 0
        return self._pending

    def tell(self, mask: Mask, found: Agreement) -> None:
        self._log.add(mask, found, self._clock() - self._asked_s)
        self._num_failed_in_a_row = 0
        self._pending = None

    def fail(self, mask: Mask) -> None:
        """`mask` could not be judged: it is asked once more, then given up."""
        self._num_attempts += 1
        if self._num_attempts == _MOST_ATTEMPTS:
            self._log.add_failed(mask, self._clock() - self._asked_s)
            self._failed.add(mask)
            self._num_failed_in_a_row += 1
            self._pending = None

    def _all(self, plan: Plan) -> Iterator[Mask]:
        for size in plan.sizes:
            for arm in plan.arms:
                space = Space(plan.num_layers, size)
                self.histories.append(History(arm, space))
                yield from self._run(ARMS[arm](space, plan.budget, plan.seed), self.histories[-1])

    def _run(self, asking: Asking, history: History) -> Iterator[Mask]:
        """Yields what is not in the log; by the time it goes on, it is, or has failed."""
        mask = next(asking, None)
        while mask is not None:
            if self._log.get(mask) is None and mask not in self._failed:
                yield mask
            found = self._log.get(mask)
            assert found is not None or mask in self._failed, "asked and not told"
            self.num_asked += 1
            if found is not None and len(mask) == history.space.num_skipped:
                history.masks.append(mask)
                history.costs.append(found.cost)
            try:
                mask = asking.send(math.inf if found is None else found.cost)
            except StopIteration:
                mask = None
