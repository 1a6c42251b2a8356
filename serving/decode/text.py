"""From ids to text, token by token: whole characters only, and never the beginning of a stop string."""

from collections.abc import Callable, Sequence
from functools import lru_cache

# A character is at most four bytes, so at most three byte-level tokens wait for the rest of one.
_MAX_UNDECIDED = 3
# Of a text that is gone on from, ids that say how: one would do, but special tokens leave no trace.
NUM_BEFORE = 4
_REPLACEMENT = "�"
# Texts as short as a stream's window, and how many of them are remembered.
_FEW = 2
_NUM_REMEMBERED = 1 << 15


def remembering(decode: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], str]:
    """`decode` with its latest answers for one or two ids at hand: a stream asks for the same ones again and again."""
    known = lru_cache(_NUM_REMEMBERED)(decode)
    return lambda ids: known(tuple(ids)) if len(ids) <= _FEW else decode(ids)


class TextStream:
    """Incremental detokeniser and stop matcher of one request; linear in the number of tokens.

    `decode` maps ids to text with special tokens skipped. Decoding a window that starts one piece earlier keeps
    the leading-space rules of every tokenizer family right. `before` are the last ids of a text that this one goes on
    from, without which it begins like any text.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop_strings: Sequence[str] = (),
        *,
        before: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._stops = tuple(stop for stop in stop_strings if stop)
        known_text = decode(before) if before else ""
        is_whole = not known_text.endswith(_REPLACEMENT)  # half a character is no ground to stand on
        self._window = list(before) if is_whole else []
        self._num_known = len(self._window)
        self._known_text = known_text if is_whole else ""
        self._held = ""
        self._passed = 0
        self._is_ended = False

    def push(self, token: int, *, may_end: bool = True) -> bool:
        """Take one emitted token; True when a stop string is complete (the text ends before it).

        One that is complete while the text may not end is text like any other.
        """
        self._window.append(token)
        if not self._stops:
            return False
        self._advance(final=False)
        if not may_end:
            self._passed = len(self._held)
            return False
        return self._find_stop()

    def take(self) -> str:
        """Text that is certain by now and was not taken before."""
        if self._is_ended:
            return self._release(len(self._held))
        self._advance(final=False)
        return self._release(len(self._held) - self._num_undecided)

    def finish(self) -> str:
        """The rest, whatever it is: nothing more will come."""
        if not self._is_ended:
            self._advance(final=True)
            self._find_stop()
        return self._release(len(self._held))

    def _advance(self, *, final: bool) -> None:
        """Move every token that ends on a whole character from the window to the held text."""
        if self._num_known == len(self._window):
            return
        whole, text = self._whole(final=final)
        if whole <= self._num_known:
            return
        self._held += text[len(self._known_text) :]
        known = self._window[self._num_known : whole]
        self._window = self._window[self._num_known :]
        self._num_known = len(known)
        self._known_text = self._decode(known)

    def _whole(self, *, final: bool) -> tuple[int, str]:
        """How many tokens of the window make whole characters, and their text; all of them if they never will."""
        size = len(self._window)
        text = everything = self._decode(self._window)
        for undecided in range(_MAX_UNDECIDED + 1):
            if final or not text.endswith(_REPLACEMENT):
                return size - undecided, text
            if size - undecided - 1 <= self._num_known:
                break
            text = self._decode(self._window[: size - undecided - 1])
        is_waiting = size - self._num_known <= _MAX_UNDECIDED
        return (0, "") if is_waiting else (size, everything)

    def _find_stop(self) -> bool:
        found = (self._held.find(stop, max(0, self._passed - len(stop) + 1)) for stop in self._stops)
        starts = [at for at in found if at >= 0]
        if starts:
            self._held = self._held[: min(starts)]
            self._is_ended = True
        return self._is_ended

    @property
    def _num_undecided(self) -> int:
        """Length of the longest tail that may still become a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._passed = max(0, self._passed - length)
        return text
