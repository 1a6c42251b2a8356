"""What each token looks like: whitespace, punctuation, bracket, delimiter. A table made once from the tokenizer."""

import string
from collections.abc import Iterable
from enum import IntFlag


class Kind(IntFlag):
    """A token may be of several kinds, or of none."""

    WHITESPACE = 1
    PUNCTUATION = 2
    BRACKET = 4
    DELIMITER = 8


_BRACKETS = frozenset("()[]{}<>")
_DELIMITERS = frozenset(",;:|\"'`\n")
_PUNCTUATION = frozenset(string.punctuation)

TokenKinds = bytes  # one byte of Kind flags a token id


def token_kinds(texts: Iterable[str]) -> TokenKinds:
    """`texts` are the tokens by id, as text."""
    return bytes(kind_of(text) for text in texts)


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
