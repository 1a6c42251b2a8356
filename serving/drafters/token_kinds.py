"""What each token looks like: whitespace, punctuation, bracket, delimiter. A table made once from the tokenizer."""

import string
from collections.abc import Iterable
from enum import IntFlag
from typing import TypeAlias

import numpy as np
import numpy.typing as npt


class Kind(IntFlag):
    """A token may be of several kinds, or of none."""

    WHITESPACE = 1
    PUNCTUATION = 2
    BRACKET = 4
    DELIMITER = 8


_BRACKETS = frozenset("()[]{}<>")
_DELIMITERS = frozenset(",;:|\"'`\n")
_PUNCTUATION = frozenset(string.punctuation)

# Kind flags by token id, u8[V + 1]; the last entry is none, for ids that are no token.
TokenKinds: TypeAlias = npt.NDArray[np.uint8]


def token_kinds(texts: Iterable[str]) -> TokenKinds:
    """`texts` are the tokens by id, as text."""
    return np.array([*map(kind_of, texts), 0], dtype=np.uint8)


def kind_of(text: str) -> Kind:
    """Whitespace and punctuation: nothing else is in it; bracket and delimiter: there is one in it."""
    letters, kind = set(text), Kind(0)
    if text and text.isspace():
        kind |= Kind.WHITESPACE
    if text.strip() and set(text.strip()) <= _PUNCTUATION:
        kind |= Kind.PUNCTUATION
    if letters & _BRACKETS:
        kind |= Kind.BRACKET
    if letters & _DELIMITERS:
        kind |= Kind.DELIMITER
    return kind
