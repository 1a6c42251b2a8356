"""Who may have a drafter read text: the one cost of speculation that pays over a session and not in its round.

Before it drafts for a session, a drafter reads what it has not read: the whole prompt at first, later what was emitted
while it was not asked. Against the gain of that one round this rarely pays, over a session it may, and what it is worth
depends on how long answers are. So reading is paid by all sessions together, from a fund in tokens of plain decoding:
an allowance a round and what drafts gain flow in, what they lose and what was read flow out. A reading is granted where
the fund can pay what this text is expected to cost without owing more than _MOST_OWED; a free one always is.

While readings at a load (a batch size, to a power of two) have not been worth their price lately, each that ends halves
the allowance there, down to _LEAST_SHARE: trials become rare, not impossible, and what pays again doubles it.

So what speculation costs, reading included, exceeds what it gives by no more than credit + allowance * rounds +
_MOST_OWED + the error of one prediction, and what sessions that have read lose by drafts, which their accounts bound.
"""

_MOST_OWED = 4.0  # tokens: half a text that was read is worth nothing
_MOST_SAVED = 32.0  # tokens: what past gains may pay for
_LEAST_SHARE = 1 / 8
_HOPED = 4.0  # tokens: what a reading is taken to be worth before there was any, beyond its price
_WORTH_SMOOTHING = 0.1  # of what readings were worth
_PACE_POSITIONS = 64  # readings of so many positions change what the next is expected to take by half

UNKNOWN_COST = _MOST_OWED / 2  # tokens: of a reading before there was any, so that not all sessions try at once


class ReadingFund:
    """Tokens that may be spent on reading. `credit` is what there is before anything was gained."""

    def __init__(self, credit: float) -> None:
        self._balance = credit
        self._promised = 0.0
        self._shares: dict[int, float] = {}
        self._worth: dict[int, float] = {}

    @property
    def savings(self) -> float:
        """What all sessions together gained and have not spent, in tokens."""
        return max(0.0, self._balance)

    def allow(self, tokens: float, batch_size: int) -> None:
        """One session's allowance for a round: its share at this load."""
        self.earn(tokens * self._shares.get(_load(batch_size), 1.0))

    def judge(self, batch_size: int, *, paid: float, gained: float) -> None:
        """A session that read at this load has ended: it was paid so many tokens, and its drafts gained so many."""
        load = _load(batch_size)
        share, worth = self._shares.get(load, 1.0), self._worth.get(load, _HOPED)
        self._worth[load] = worth + _WORTH_SMOOTHING * (gained - paid - worth)
        self._shares[load] = min(1.0, 2 * share) if self._worth[load] >= 0.0 else max(_LEAST_SHARE, share / 2)

    def earn(self, tokens: float) -> None:
        """What a draft gained; negative where it lost."""
        self._balance = min(_MOST_SAVED, self._balance + tokens)

    def grant(self, tokens: float) -> bool:
        """Whether a session may read in the coming round, which is expected to cost `tokens`."""
        if self._promised + tokens > max(0.0, self._balance + _MOST_OWED):
            return False
        self._promised += tokens
        return True

    def end_round(self) -> None:
        """What was promised has been read, or was not asked for."""
        self._promised = 0.0

    def pay(self, tokens: float) -> None:
        """What a session's round of reading took."""
        self._balance -= tokens


def _load(batch_size: int) -> int:
    return batch_size.bit_length()


class ReadingPace:
    """Seconds that a drafter takes to read a position, from the readings so far; long ones tell more."""

    def __init__(self) -> None:
        self._position_s: float | None = None

    def seconds(self, num_positions: int) -> float | None:
        """Expected time to read so many; None before there was a reading."""
        return None if self._position_s is None else self._position_s * num_positions

    def record(self, num_positions: int, seconds: float) -> None:
        """One reading of at least one position."""
        if self._position_s is None:
            self._position_s = seconds / num_positions
            return
        error_s = seconds - self._position_s * num_positions
        self._position_s += error_s / (num_positions + _PACE_POSITIONS)
