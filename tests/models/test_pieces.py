"""Tokens as bytes and text: hand-made vocabularies of both families."""

from dataclasses import dataclass

import pytest

from serving.models.pieces import BYTE_OF, byte_level, sentencepiece, shown
from serving.models.tokenizer import ChatTokenizer


def test_the_table_has_each_byte_once() -> None:
    assert sorted(BYTE_OF.values()) == list(range(256))


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        ("Hello", b"Hello"),
        ("\u0120a", b" a"),
        ("\u010a", b"\n"),
        ("\u00c3\u00a9", "\u00e9".encode()),
        ("\u00f0\u0141", b"\xf0\x9f"),
        ("\u0143", b"\xad"),
        ("\u6c34", "\u6c34".encode()),
    ],
)
def test_byte_level(piece: str, expected: bytes) -> None:
    assert byte_level(piece) == expected


@pytest.mark.parametrize(
    ("piece", "expected"),
    [("\u2581a", b" a"), ("a\u2581\u2581", b"a  "), ("<0x0A>", b"\n"), ("<0xF0>", b"\xf0"), ("<0xF0", b"<0xF0")],
)
def test_sentencepiece(piece: str, expected: bytes) -> None:
    assert sentencepiece(piece) == expected


@pytest.mark.parametrize(
    ("token", "expected"), [(b" a", " a"), (b"\xf0\x9f", "bytes:\\xf0\\x9f"), (b"a\xc3", "bytes:\\x61\\xc3"), (b"", "")]
)
def test_shown(token: bytes, expected: str) -> None:
    assert shown(token) == expected


@dataclass(frozen=True)
class Added:
    special: bool


class Vocabulary:
    """The part of a transformers tokenizer that a token's text comes from."""

    def __init__(self, *pieces: str, **added: bool) -> None:
        self._pieces = [*pieces, *added]
        self.added_tokens_decoder = {len(pieces) + at: Added(special) for at, special in enumerate(added.values())}

    def get_vocab(self) -> dict[str, int]:
        return {piece: at for at, piece in enumerate(self._pieces)}

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return self._pieces[token] if token < len(self._pieces) else None


@pytest.mark.parametrize(
    ("vocabulary", "expected"),
    [
        (Vocabulary("\u0120", "\u0120a", "\u00f0", eos=True, é=False), [" ", " a", "bytes:\\xf0", "eos", "é"]),
        (Vocabulary("\u2581", "\u0120", "<0x0A>", eos=True, é=False), [" ", "\u0120", "\n", "eos", "é"]),
    ],
)
def test_the_family_is_told_by_the_vocabulary(vocabulary: Vocabulary, expected: list[str]) -> None:
    tokenizer = ChatTokenizer("made", frozenset({3}), 5, vocabulary)
    assert [tokenizer.token_text(token) for token in range(6)] == [*expected, ""]
    assert tokenizer.special_ids == {3}
