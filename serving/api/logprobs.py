"""Log probabilities in the shapes of both endpoints: a list of tokens for chats, columns for text."""

import codecs
from collections.abc import Iterable, Sequence

from serving.api.backend import Speller
from serving.api.responses import ChatLogprobs, ChatTokenLogprob, TextLogprobs, TopLogprob
from serving.types import TokenLogprob

IMPOSSIBLE = -9999.0  # OpenAI's number for what is out of reach; JSON has no infinity


def chat_logprobs(entries: Iterable[TokenLogprob], speller: Speller) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat_entry(entry, speller) for entry in entries], refusal=None)


def text_logprobs(entries: Sequence[TokenLogprob], speller: Speller, offsets: "Offsets") -> TextLogprobs:
    """Each token's own entry is among its likeliest, as OpenAI has it. Advances `offsets`."""
    return TextLogprobs(
        tokens=[speller.token_text(entry.token_id) for entry in entries],
        token_logprobs=[_finite(entry.logprob) for entry in entries],
        top_logprobs=[_with_own(entry, speller) for entry in entries],
        text_offset=[offsets.advance(entry.token_id) for entry in entries],
    )


class Offsets:
    """Where the tokens of one choice begin in its text, in characters. Mutable: grows token by token.

    A token in the middle of a character begins with it; a special token leaves no trace in the text.
    """

    def __init__(self, speller: Speller) -> None:
        self._speller = speller
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def advance(self, token: int) -> int:
        """The offset of `token`, which is the next one."""
        offset = self._num_chars
        if token not in self._speller.special_ids:
            self._num_chars += len(self._decoder.decode(self._speller.token_bytes(token)))
        return offset


def _chat_entry(entry: TokenLogprob, speller: Speller) -> ChatTokenLogprob:
    own = _shown(entry.token_id, entry.logprob, speller)
    top = [_shown(token, logprob, speller) for token, logprob in entry.top]
    return ChatTokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)


def _shown(token: int, logprob: float, speller: Speller) -> TopLogprob:
    return TopLogprob(token=speller.token_text(token), logprob=_finite(logprob), bytes=list(speller.token_bytes(token)))


def _with_own(entry: TokenLogprob, speller: Speller) -> dict[str, float]:
    pairs = [*entry.top, (entry.token_id, entry.logprob)]
    return {speller.token_text(token): _finite(logprob) for token, logprob in pairs}


def _finite(logprob: float) -> float:
    return max(logprob, IMPOSSIBLE)
