"""Arms measured in turns, and what is concluded: ratios within a repeat, medians over repeats, identity.

In every repeat all arms are under way at once and take turns, ours round by round, each on a clock of its own: a slow
second of the machine slows all of them. Every second turn goes backwards, so that none is always the one after a busy
neighbour; each round finds the processor's caches as another arm has left them. What cannot be stopped in the middle,
like transformers' `generate`, has one turn for all its work.
"""

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from jobs.figures import Cell, Spread

Outputs = list[list[int]]


@dataclass(frozen=True)
class Measured:
    """One arm in one repeat; `tpots_ms` has an entry an output, None where an output has less than two tokens.

    `cycles_per_1k`: rounds, of drafting and of verification, a thousand tokens.
    """

    seconds: float
    outputs: Outputs
    tpots_ms: Sequence[float | None] = ()
    accepted_length: float | None = None
    target_passes_per_token: float | None = None
    cycles_per_1k: float | None = None

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.outputs)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Arm:
    """One way to answer the prompts. `is_comparable`: the same ids are due of it as of every other such arm.

    `turns` begins a repeat: it works while it is asked for the next item, gives None after each turn, at its end the
    result.
    """

    turns: Callable[[], Iterator[Measured | None]]
    is_comparable: bool = True

    def measure(self) -> Measured:
        """A repeat by itself."""
        return next(result for result in self.turns() if result is not None)


@dataclass(frozen=True)
class Repeat:
    """One repeat of one arm, raw."""

    seconds: float
    tokens: int
    tokens_per_s: float
    tpot_ms: Sequence[float | None]


@dataclass(frozen=True)
class Run:
    """One arm over all repeats; a ratio is of speeds, and None without its other side."""

    name: str
    tokens_per_s: float
    ratio_to_generate: float | None
    ratio_to_lookup: float | None
    ratio_to_assisted: float | None
    ratio_to_plain: float | None
    tpot_ms: Spread | None
    accepted_length: float | None
    target_passes_per_token: float | None
    cycles_per_1k: float | None
    identical_to_plain: float | None
    identical_to_generate: float | None
    repeats: Sequence[Repeat]

    @property
    def row(self) -> dict[str, Cell]:
        """What the table shows of it."""
        return {
            "name": self.name,
            "tokens/s": self.tokens_per_s,
            "vs generate": self.ratio_to_generate,
            "vs lookup": self.ratio_to_lookup,
            "vs assisted": self.ratio_to_assisted,
            "vs plain": self.ratio_to_plain,
            "TPOT ms": self.tpot_ms.p50 if self.tpot_ms else None,
            "accepted length": self.accepted_length,
            "passes/token": self.target_passes_per_token,
            "cycles/1k": self.cycles_per_1k,
            "= plain": self.identical_to_plain,
            "= generate": self.identical_to_generate,
        }


def orders(names: Sequence[str], repeats: int) -> list[list[str]]:
    """The order of the arms in each repeat: ABC, CBA, ABC, ..."""
    return [list(names) if repeat % 2 == 0 else list(reversed(names)) for repeat in range(repeats)]


def measure(arms: Mapping[str, Arm], order: Sequence[Sequence[str]]) -> dict[str, list[Measured]]:
    """Each arm's repeats, in the order of the repeats."""
    found: dict[str, list[Measured]] = {name: [] for name in arms}
    with tqdm(total=sum(map(len, order)), unit="run", file=sys.stderr, dynamic_ncols=True) as bar:
        for repeat in order:
            names, under_way = list(repeat), {name: arms[name].turns() for name in repeat}
            while under_way:
                for name in [name for name in names if name in under_way]:
                    bar.set_description(name, refresh=False)
                    result = next(under_way[name])
                    if result is not None:
                        found[name].append(result)
                        del under_way[name]
                        bar.update(1)
                names.reverse()
    return found


def summarise(repeats: Mapping[str, Sequence[Measured]], incomparable: frozenset[str] = frozenset()) -> list[Run]:
    """One run an arm. Outputs of `incomparable` arms are not compared with any others."""
    comparable = {name: measured for name, measured in repeats.items() if name not in incomparable}
    return [
        Run(
            name=name,
            tokens_per_s=round(statistics.median(one.tokens_per_s for one in measured), 2),
            ratio_to_generate=_ratio(measured, repeats.get("generate")),
            ratio_to_lookup=_ratio(measured, repeats.get("lookup")),
            ratio_to_assisted=_ratio(measured, repeats.get("assisted")),
            ratio_to_plain=_ratio(measured, repeats.get("plain")),
            tpot_ms=Spread.of(value for one in measured for value in one.tpots_ms),
            accepted_length=_median(one.accepted_length for one in measured),
            target_passes_per_token=_median(one.target_passes_per_token for one in measured),
            cycles_per_1k=_median(one.cycles_per_1k for one in measured),
            identical_to_plain=_identical(comparable.get(name), comparable.get("plain")),
            identical_to_generate=_identical(comparable.get(name), comparable.get("generate")),
            repeats=[Repeat(one.seconds, one.tokens, one.tokens_per_s, one.tpots_ms) for one in measured],
        )
        for name, measured in repeats.items()
    ]


def _ratio(measured: Sequence[Measured], other: Sequence[Measured] | None) -> float | None:
    if other is None:
        return None
    return round(statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in zip(measured, other, strict=True)), 3)


def _median(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return round(statistics.median(there), 3) if there else None


def _identical(measured: Sequence[Measured] | None, other: Sequence[Measured] | None) -> float | None:
    """The share of outputs, of all repeats, that are the same ids."""
    if measured is None or other is None:
        return None
    pairs = [pair for a, b in zip(measured, other, strict=True) for pair in zip(a.outputs, b.outputs, strict=True)]
    return round(sum(a == b for a, b in pairs) / len(pairs), 3)
