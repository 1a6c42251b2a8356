"""Who may have a drafter read its text: the one cost of speculation that a session has once, and not a round.

A drafter's first draft for a session reads the whole prompt. Against the gain of that one round it never pays, over a
session it may, and what it is worth depends on how long answers are. So reading is paid by all sessions together,
from a fund in tokens of plain decoding: an allowance a round and what drafts gain flow in, what they lose and what was
read flow out, and nobody starts to read while it is in debt; who reads in several rounds may go on into a small one.
What speculation costs, reading included, thus exceeds what it gives by no more than credit + allowance * rounds + that
debt + the last round of reading, and what sessions that have read lose by drafts, which their own accounts bound.
"""

_MOST_OWED = 4.0  # tokens: half a text that was read is worth nothing
_MOST_SAVED = 32.0  # tokens: what past gains may pay for
_SMOOTHING = 0.5


class ReadingFund:
    """Tokens that may be spent on reading. `credit` is what there is before anything was gained."""

    def __init__(self, credit: float) -> None:
        self._balance = credit
        self._promised = 0.0
        self._cost = credit  # of a session's round of reading: a guess until there was one

    def earn(self, tokens: float) -> None:
        """An allowance, or what a draft gained; negative where it lost."""
        self._balance = min(_MOST_SAVED, self._balance + tokens)

    def grant(self, *, has_begun: bool) -> bool:
        """Whether one more session may read in the coming round, or go on."""
        if self._balance < self._promised - _MOST_OWED * has_begun:
            return False
        self._promised += self._cost
        return True

    def end_round(self) -> None:
        """What was promised has been read, or was not asked for."""
        self._promised = 0.0

    def pay(self, tokens: float) -> None:
        """What a session's round of reading took."""
        self._balance -= tokens
        self._cost += _SMOOTHING * (tokens - self._cost)
