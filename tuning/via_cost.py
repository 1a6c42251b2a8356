"""When a middle tier pays: counted passes times measured seconds, against strict speculation with the same drafter.

A strict round costs a draft and a full pass. With a slim verifier it costs a draft and a slim pass, and where the
block is escalated a full pass over everything that the target has not seen, on top. Prompts are read once more, by the
slim verifier, in passes of many rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from serving.decode.costs import CostModel
from serving.decode.stats import EngineStats


@dataclass(frozen=True)
class PassTimes:
    """Seconds by rows of one session: a full pass, a slim one; of one drafted token, 0 where none was measured.

    `is_seeded`: the slim verifier starts from the target's KV and reads no prompts.
    """

    full: Mapping[int, float]
    slim: Mapping[int, float]
    draft_s: float = 0.0
    is_seeded: bool = False

    @property
    def reading_s(self) -> float:
        """Of the slim verifier, a prompt token: a row of the largest pass."""
        most = max(self.slim)
        return 0.0 if self.is_seeded else self.slim[most] / most

    @property
    def slim_ratio(self) -> float:
        """A slim pass over a full one, mean over the row counts that both have."""
        rows = [count for count in self.full if count in self.slim]
        return sum(self.slim[count] / self.full[count] for count in rows) / len(rows)

    @property
    def flat(self) -> "PassTimes":
        """The same where a pass costs the same for few rows as for one: bound by reading the weights."""
        one = min(self.full)
        full, slim = dict.fromkeys(self.full, self.full[one]), dict.fromkeys(self.slim, self.slim[one])
        return replace(self, full=full, slim=slim)


@dataclass(frozen=True)
class Modelled:
    """Milliseconds an emitted token by part, one sequence at a time."""

    full_ms: float
    slim_ms: float
    draft_ms: float
    reading_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        return self.full_ms + self.slim_ms + self.draft_ms + self.reading_ms


def modelled(stats: EngineStats, times: PassTimes) -> Modelled:
    """Of a run with `stats`: its passes and drafts, and what the slim verifier takes to read its prompts.

    What the target takes for them is left out, for every run has that; shared prefixes count as if they were read.
    """
    full = _passes_s(stats.target_passes, stats.target_rows, times.full)
    slim = _passes_s(stats.slim_passes, stats.slim_rows, times.slim)
    scale = 1000.0 / max(1, stats.emitted)
    reading = stats.prompt_tokens * times.reading_s if stats.slim_passes else 0.0
    return Modelled(scale * full, scale * slim, scale * stats.drafted * times.draft_s, scale * reading)


def break_even(strict: Modelled, via: Modelled) -> float | None:
    """What the slim verifier's work would have to cost of what it does for both to cost the same.

    None where the full passes and drafts of the three tiers alone cost more than strict does.
    """
    left = strict.total_ms - via.full_ms - via.draft_ms
    slim_ms = via.slim_ms + via.reading_ms
    return left / slim_ms if slim_ms > 0 and left > 0 else None


def verdict(strict: Modelled, via: Modelled, times: PassTimes) -> str:
    """One sentence for the user."""
    change = via.total_ms / strict.total_ms
    says = (
        f"{via.total_ms:.2f} ms a token, {via.reading_ms:.2f} of it for the slim tier to read prompts, "
        f"against {strict.total_ms:.2f} strict ({1 / change:.2f}x the speed)"
    )
    factor = break_even(strict, via)
    if factor is None:
        return f"the middle tier does not pay: {says}; it would not even if slim passes were free"
    limit = factor * times.slim_ratio
    state = "pays" if change < 1 else "does not pay"
    return (
        f"the middle tier {state}: {says}; a slim pass costs {times.slim_ratio:.2f} of a full one, even is {limit:.2f}"
    )


def least_saving(times: PassTimes, rows: int) -> float | None:
    """The share of full passes that a slim tier must save to cost no more than strict does, over as many rounds.

    Blocks have `rows` rows. A slim pass over each comes on top; the full passes that are left catch up, so each of
    them scores the rows of the saved ones too. None where saving 99 % would not do.
    """
    full = CostModel(times.full)
    strict_s, slim_s = full.seconds(rows), CostModel(times.slim).seconds(rows)
    for percent in range(100):
        left = 1.0 - percent / 100
        if slim_s + left * full.seconds(rows / left) <= strict_s:
            return percent / 100
    return None


def saving_verdict(times: PassTimes, rows: int) -> str:
    """`least_saving` as a sentence for the user, with what it leaves out: it depends on prompts and answers."""
    share = least_saving(times, rows)
    reading = f"; besides it reads every prompt, {1000 * times.reading_s:.2f} ms a token"
    says = f"a slim pass of {rows} rows costs {times.slim[rows] / times.full[rows]:.2f} of a full one here"
    if share is None:
        return f"{says}: the middle tier does not pay, however many full passes it saves{reading}"
    return f"{says}: the middle tier pays if it saves more than {share:.0%} of the full passes{reading}"


def _passes_s(passes: int, rows: int, seconds: Mapping[int, float]) -> float:
    return passes * CostModel(seconds).seconds(rows / passes) if passes else 0.0
