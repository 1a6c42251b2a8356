"""What one Target sends to one Gateway: frames of chunks over TCP. No Ray.

A frame is its length as u32, then a pickled list of chunks. A Gateway begins with its name, NAME_BYTES that nobody
else can guess, and says nothing more; so a Target unpickles nothing, and a Gateway only from where Serve sent it.
"""

import asyncio
import pickle
import secrets
import socket
import struct
from collections.abc import Sequence
from typing import TypeAlias

from serving.requests import Chunk

Address: TypeAlias = tuple[str, int]

NAME_BYTES = 16
_LENGTH = struct.Struct("!I")
# A peer whose machine is gone says no goodbye: it is asked after so many seconds of silence, then again each second.
_SILENCE_S = 5
_NUM_ASKED = 5


class ChannelLostError(Exception):
    """The connection of a Target and a Gateway broke, or could not be made; what was on its way is gone."""


def new_name() -> bytes:
    """A name for a Gateway, and its credential."""
    return secrets.token_bytes(NAME_BYTES)


def frame_of(chunks: Sequence[Chunk]) -> bytes:
    """`chunks` as bytes on the wire."""
    body = pickle.dumps(list(chunks), protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> list[Chunk]:
    """The chunks of the next frame. Raises EOFError where there is none."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    chunks: list[Chunk] = pickle.loads(await reader.readexactly(length))
    return chunks


def listener(host: str) -> socket.socket:
    """A socket that listens at `host`, on any free port."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def notice_silence(writer: asyncio.StreamWriter) -> None:
    """Have the connection break by itself some seconds after its peer's machine is gone, or takes nothing any more."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {
        "TCP_KEEPIDLE": _SILENCE_S,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": _NUM_ASKED,
        # Nobody is asked while data is on its way, which would be sent again for a quarter of an hour.
        "TCP_USER_TIMEOUT": 1000 * (_SILENCE_S + _NUM_ASKED),
    }
    for name, value in limits.items():
        if hasattr(socket, name):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
