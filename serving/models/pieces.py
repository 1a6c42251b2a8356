"""From a vocabulary's spelling of a token to the bytes it stands for."""

import re

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def _byte_of() -> dict[str, int]:
    """GPT-2's table: printable bytes are themselves, the others take the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


BYTE_OF = _byte_of()


def byte_level(piece: str) -> bytes:
    """A piece of a byte-level BPE. One that is not spelled by the table stands for itself."""
    if any(character not in BYTE_OF for character in piece):
        return piece.encode()
    return bytes(BYTE_OF[character] for character in piece)


def sentencepiece(piece: str) -> bytes:
    """A piece of a sentencepiece vocabulary: U+2581 is a space, <0xNN> one byte."""
    if byte := _BYTE_PIECE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace(_SPACE, " ").encode()


def shown(token: bytes) -> str:
    """A token's bytes as text; in OpenAI's spelling `bytes:\\xNN` where they are no whole characters."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
