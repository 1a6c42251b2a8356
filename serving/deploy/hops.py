"""What it costs that a role is in another process."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hops:
    """Sums over the calls that the Target waited for: how many, their time, and the role's own part of it.

    A call beside which the Target did other work for longer than it waited is left out: when its answer came
    is not known, and its hop is hidden anyway.
    """

    num_calls: int = 0
    call_s: float = 0.0
    compute_s: float = 0.0

    @property
    def hop_s(self) -> float:
        return self.call_s - self.compute_s

    def plus(self, *, sent_s: float, asked_s: float, answered_s: float, compute_s: float) -> "Hops":
        """With one more call: when it was sent, when its answer was asked for, when it was there."""
        if asked_s - sent_s > answered_s - asked_s:
            return self
        call_s = answered_s - sent_s
        return Hops(self.num_calls + 1, self.call_s + call_s, self.compute_s + min(compute_s, call_s))
