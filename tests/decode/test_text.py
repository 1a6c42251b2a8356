"""Streams of text: whole characters, exact concatenation, stops that never show their beginning, linear cost."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from serving.decode.text import TextStream, remembering


def utf8(ids: Sequence[int]) -> str:
    """One byte a token, as byte-level tokenizers do at worst."""
    return bytes(ids).decode("utf-8", errors="replace")


@given(st.text(max_size=40), st.lists(st.integers(1, 5), max_size=40))
def test_case_06_deltas_concatenate_to_the_text_and_never_cut_a_character(text: str, blocks: list[int]) -> None:
    stream, tokens, shown = TextStream(utf8), list(text.encode()), ""
    while tokens:
        size = blocks.pop() if blocks else 1
        for token in tokens[:size]:
            assert not stream.push(token)
        tokens = tokens[size:]
        delta = stream.take()
        assert "�" not in delta or "�" in text
        shown += delta
        assert text.startswith(shown)
    assert shown + stream.finish() == text


@given(st.text("ab🙂", max_size=30), st.lists(st.text("ab🙂", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_ends_the_text_before_it_and_its_beginning_is_never_shown(text: str, stops: list[str]) -> None:
    stream, shown, ended = TextStream(utf8, stops), "", False
    for token in text.encode():
        ended = stream.push(token)
        shown += stream.take()
        if ended:
            break
    shown += stream.finish()
    complete = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not complete:
        assert shown == text
        assert not ended
        return
    first = text[: min(complete)]
    assert ended
    assert shown == first[: min(first.find(stop) for stop in stops if stop in first)]


def sentencepiece(*words: str) -> Tokenizer:
    """A tokenizer that marks the beginning of a word and spells what it does not know in bytes, as Llama 2's does."""
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(["<s>", *spelled, *words])}))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.mark.parametrize("prompt", [["\u2581Say"], ["<s>", "\u2581Say", "<s>"], ["\u2581Say", "<0xC3>", "<0xA9>"]])
def test_a_text_that_goes_on_keeps_its_first_space(prompt: list[str]) -> None:
    tokenizer = sentencepiece("\u2581Say", "\u2581it", "ness")
    before, pieces = [tokenizer.token_to_id(piece) for piece in prompt], ["\u2581it", "ness", "<0xC3>", "<0xA9>"]
    for stream, expected in (
        (TextStream(tokenizer.decode, before=before), " itness\u00e9"),
        (TextStream(tokenizer.decode), "itness\u00e9"),
    ):
        shown = ""
        for piece in pieces:
            stream.push(tokenizer.token_to_id(piece))
            shown += stream.take()
        assert shown + stream.finish() == expected


def test_a_character_that_began_before_the_text_is_not_lost() -> None:
    tokenizer = sentencepiece("\u2581Say", "\u2581it")
    stream = TextStream(tokenizer.decode, before=[tokenizer.token_to_id(piece) for piece in ("\u2581Say", "<0xC3>")])
    for piece in ("<0xA9>", "\u2581it"):
        stream.push(tokenizer.token_to_id(piece))
    assert stream.finish() == "\ufffd it"


def test_no_stop_string_reaches_back_before_the_text() -> None:
    stream = TextStream(utf8, ["ab"], before=list(b"xa"))
    assert [stream.push(byte) for byte in b"bab"] == [False, False, True]
    assert stream.finish() == "b"


def test_invalid_bytes_are_not_held_back_for_ever() -> None:
    stream = TextStream(utf8)
    for _ in range(20):
        stream.push(0x80)
    assert stream.take()


@pytest.mark.parametrize("stops", [(), ("zzz",)])
def test_case_06_the_cost_is_linear(stops: tuple[str, ...]) -> None:
    decoded = 0

    def counting(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return utf8(ids)

    stream = TextStream(counting, stops)
    for token in "a🙂".encode() * 500:
        stream.push(token)
        stream.take()
    assert decoded < 2500 * 16


def test_a_stop_string_counts_only_where_the_text_may_end() -> None:
    stream = TextStream(utf8, ["ab"])
    assert [stream.push(byte, may_end=i >= 3) for i, byte in enumerate(b"abaXab")] == [False] * 5 + [True]
    assert stream.finish() == "abaX"
    crossing = TextStream(utf8, ["abc"])
    assert [crossing.push(byte, may_end=i >= 2) for i, byte in enumerate(b"abc")] == [False, False, True]
    assert crossing.finish() == ""


def test_what_was_decoded_lately_is_not_decoded_again() -> None:
    asked: list[list[int]] = []

    def decode(ids: Sequence[int]) -> str:
        asked.append(list(ids))
        return "".join(chr(97 + one) for one in ids)

    known = remembering(decode)
    for _ in range(2):
        assert [known([0]), known([0, 1]), known([0, 1, 2])] == ["a", "ab", "abc"]
    assert asked == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]
