"""The run of several mask searches on equal budgets: what was asked, what it cost, and where to go on.

The log is the only truth: one JSON line a question that was answered. A search that is started again asks the same
questions in the same order and finds the answers of those that are in the log.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from serving.errors import ConfigError, one_line
from tuning.dimr import Agreement
from tuning.mask_space import Asking, Mask, Question, Space
from tuning.masks import ARMS, least_budget

_MOST_ATTEMPTS = 2
_HOPELESS = 3  # masks in a row that could not be judged: more of them would fare no better


@dataclass(frozen=True)
class Plan:
    """Each arm searches each size with at most `budget` questions. Raises ConfigError where an arm needs more."""

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
                    f"--budget: arm {arm!r} needs at least {least} on {self.num_layers} layers, got "
                    f"{self.budget}; raise it, or leave the arm out of --arms"
                )


class _Head(BaseModel):
    """The first line of a log."""

    identity: str


class _Line(BaseModel):
    """An answered question, or a failed one, which has no cost."""

    skipped: Mask
    block: int
    seconds: float | None = None
    cost: float = math.inf
    kl: float = math.inf
    top1: float = 0.0


_LineT = TypeVar("_LineT", bound=BaseModel)


class MaskLog:
    """Masks on blocks of rows and their agreement with the target, on disk line by line; where it failed, without one.

    `identity` names model and data. Raises ConfigError for a file that has another one, and for a line that is none of
    a log, naming it. `seconds` is what the `num_evaluated` questions of all runs took, failed ones among them.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        self._known: dict[Question, Agreement] = {}
        self.seconds = 0.0
        self.num_evaluated = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        if lines and not lines[-1].endswith(b"\n"):  # the process was killed while it wrote a line
            lines.pop()
            path.write_bytes(b"".join(lines))
        if not lines:
            self._append({"identity": identity})
        elif self._parsed(_Head, 1, lines[0]).identity != identity:
            raise ConfigError(f"--out: {path} belongs to another model or other data; choose another folder")
        for number, line in enumerate(lines[1:], 2):
            self._read(self._parsed(_Line, number, line))

    def __len__(self) -> int:
        return len(self._known)

    def get(self, question: Question) -> Agreement | None:
        return self._known.get(question)

    def add(self, question: Question, found: Agreement, seconds: float) -> None:
        self._known[question] = found
        self._count(seconds)
        self._append({"skipped": question.mask, "block": question.block, "seconds": seconds, **asdict(found)})

    def add_failed(self, question: Question, seconds: float) -> None:
        """For the record: a later run knows nothing of it and asks it again."""
        self._count(seconds)
        self._append({"skipped": question.mask, "block": question.block, "seconds": seconds, "failed": True})

    def _append(self, record: dict[str, object]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _parsed(self, kind: type[_LineT], number: int, line: bytes) -> _LineT:
        try:
            return kind.model_validate_json(line)
        except ValidationError as error:
            raise ConfigError(
                f"--out: {self._path}, line {number}: is no line of a mask search ({one_line(error)}); delete "
                f"{'the file' if number == 1 else 'the line'}, and what it held is asked again"
            ) from None

    def _read(self, line: _Line) -> None:
        if line.seconds is not None:
            self._count(line.seconds)
        if math.isfinite(line.cost):
            self._known[Question(line.skipped, line.block)] = Agreement(line.cost, line.kl, line.top1)

    def _count(self, seconds: float) -> None:
        self.seconds += seconds
        self.num_evaluated += 1


@dataclass
class History:
    """One arm on one size: the masks of that size in the order they were asked, and their costs on the first block.

    Masks that could not be judged are no part of it, so there may be none. `final_costs` are those of its best masks on
    more data, where they were judged again. `num_asked` counts questions of any kind.
    """

    arm: str
    space: Space
    num_asked: int = 0
    masks: list[Mask] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    final_costs: dict[Mask, float] = field(default_factory=dict)

    def take(self, question: Question, cost: float) -> None:
        """The answer to what the arm asked."""
        if question.block == 0 and len(question.mask) == self.space.num_skipped:
            self.masks.append(question.mask)
            self.costs.append(cost)

    def leaders(self, count: int) -> list[Mask]:
        """The `count` masks of least final cost, or of least cost where none was judged again; the best first."""
        costs = self.final_costs or dict(zip(self.masks, self.costs, strict=True))
        return sorted(costs, key=costs.__getitem__)[:count]

    @property
    def best(self) -> Mask:
        """The first of the leaders."""
        return self.leaders(1)[0]

    @property
    def running_best(self) -> list[float]:
        found, least = [], math.inf
        for cost in self.costs:
            least = min(least, cost)
            found.append(least)
        return found


class MaskSearch:
    """Asks one question after the other: `ask` until it is None, `tell` what it cost, or `fail` it.

    An arm hears of one that failed as of the costliest there is.
    """

    def __init__(self, plan: Plan, log: MaskLog, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self.histories: list[History] = []
        self._pending: Question | None = None
        self._asked_s = 0.0
        self._num_attempts = 0
        self._failed: set[Question] = set()
        self._num_failed_in_a_row = 0
        self._questions = self._all(plan)

    @property
    def is_hopeless(self) -> bool:
        """Whether so many questions in a row failed that something else must be wrong."""
        return self._num_failed_in_a_row >= _HOPELESS

    @property
    def num_asked(self) -> int:
        """Questions of all arms that have their answer, be it from the log, or have failed."""
        return sum(history.num_asked for history in self.histories)

    def ask(self) -> Question | None:
        """The next question that no one knows the answer to; the same one until it is told, or has failed twice."""
        if self._pending is None:
            self._pending = next(self._questions, None)
            self._asked_s = self._clock()
            self._num_attempts = 0
        return self._pending

    def tell(self, question: Question, found: Agreement) -> None:
        self._log.add(question, found, self._clock() - self._asked_s)
        self._num_failed_in_a_row = 0
        self._pending = None

    def fail(self, question: Question) -> None:
        """It could not be judged: it is asked once more, then given up."""
        self._num_attempts += 1
        if self._num_attempts == _MOST_ATTEMPTS:
            self._log.add_failed(question, self._clock() - self._asked_s)
            self._failed.add(question)
            self._num_failed_in_a_row += 1
            self._pending = None

    def _all(self, plan: Plan) -> Iterator[Question]:
        for size in plan.sizes:
            for arm in plan.arms:
                space = Space(plan.num_layers, size)
                self.histories.append(History(arm, space))
                yield from self._run(ARMS[arm](space, plan.budget, plan.seed), self.histories[-1])

    def _run(self, asking: Asking, history: History) -> Iterator[Question]:
        """Yields what is not in the log; by the time it goes on, it is, or has failed."""
        question = next(asking, None)
        while question is not None:
            if self._log.get(question) is None and question not in self._failed:
                yield question
            found = self._log.get(question)
            assert found is not None or question in self._failed, "asked and not told"
            history.num_asked += 1
            if found is not None:
                history.take(question, found.cost)
            try:
                question = asking.send(math.inf if found is None else found.cost)
            except StopIteration:
                question = None
