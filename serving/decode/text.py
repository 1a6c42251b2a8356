"""From ids to text, token by token: whole characters only, and never the beginning of a stop string."""

from collections.abc import Callable, Sequence

# A character is at most four bytes, hence at most four byte-level tokens; beyond that the bytes are just invalid.
_MAX_UNDECIDED = 8
_REPLACEMENT = "�"


class TextStream:
    """Incremental detokeniser and stop matcher of one request; linear in the number of tokens.

    `decode` maps ids to text with special tokens skipped. Decoding a window that starts one piece earlier keeps
    the leading-space rules of every tokenizer family right.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop_strings: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stop for stop in stop_strings if stop)
        self._window: list[int] = []
        self._num_known = 0
        self._known_text = ""
        self._held = ""
        self._is_ended = False

    def push(self, token: int) -> bool:
        """Take one emitted token; True when a stop string is complete (the text ends before it)."""
        self._window.append(token)
        if not self._stops:
            return False
        self._advance(final=False)
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
        if self._num_known == len(self._window):
            return
        text = self._decode(self._window)
        is_cut = text.endswith(_REPLACEMENT) and len(self._window) - self._num_known < _MAX_UNDECIDED
        if is_cut and not final:
            return
        self._held += text[len(self._known_text) :]
        self._window = self._window[self._num_known :]
        self._num_known = len(self._window)
        self._known_text = self._decode(self._window)

    def _find_stop(self) -> bool:
        starts = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
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
        return text
