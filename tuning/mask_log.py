"""The run of several mask searches on equal budgets: what was asked, what it cost, and where to go on.

The log is the only truth: one JSON line a mask that was evaluated. A search that is started again asks the same
masks in the same order and finds the answers of those that are in the log.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from serving.errors import ConfigError
from tuning.dimr import Agreement
from tuning.masks import ARMS, Asking, Mask, Space


@dataclass(frozen=True)
class Plan:
    """Each arm searches each size with at most `budget` masks."""

    num_layers: int
    sizes: Sequence[int]
    budget: int
    seed: int
    arms: Sequence[str] = tuple(ARMS)


class MaskLog:
    """Masks and their agreement with the target, on disk line by line.

    `identity` names model and data. Raises ConfigError for a file that has another one.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        self._known: dict[Mask, Agreement] = {}
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

    def add(self, mask: Mask, found: Agreement) -> None:
        self._known[mask] = found
        self._append({"skipped": mask, **asdict(found)})

    def _append(self, record: dict[str, object]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _read(self, line: str) -> None:
        record = json.loads(line)
        mask = tuple(record.pop("skipped"))
        self._known[mask] = Agreement(**record)


@dataclass
class History:
    """One arm on one size: the masks of that size in the order they were asked, and their costs.

    `final_costs` are those of its best masks on more data, where they were judged again.
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
    """Asks one mask after the other: `ask` until it is None, `tell` what it cost."""

    def __init__(self, plan: Plan, log: MaskLog) -> None:
        self._log = log
        self.histories: list[History] = []
        self.num_asked = 0
        self._pending: Mask | None = None
        self._masks = self._all(plan)

    def ask(self) -> Mask | None:
        """The next mask that no one knows the cost of; the same one until it is told."""
        if self._pending is None:
            self._pending = next(self._masks, None)
        return self._pending

    def tell(self, mask: Mask, found: Agreement) -> None:
        self._log.add(mask, found)
        self._pending = None

    def _all(self, plan: Plan) -> Iterator[Mask]:
        for size in plan.sizes:
            for arm in plan.arms:
                space = Space(plan.num_layers, size)
                self.histories.append(History(arm, space))
                yield from self._run(ARMS[arm](space, plan.budget, plan.seed), self.histories[-1])

    def _run(self, asking: Asking, history: History) -> Iterator[Mask]:
        """Yields what is not in the log; by the time it goes on, it is."""
        mask = next(asking, None)
        while mask is not None:
            if self._log.get(mask) is None:
                yield mask
            found = self._log.get(mask)
            assert found is not None, "asked and not told"
            self.num_asked += 1
            if len(mask) == history.space.num_skipped:
                history.masks.append(mask)
                history.costs.append(found.cost)
            try:
                mask = asking.send(found.cost)
            except StopIteration:
                mask = None
