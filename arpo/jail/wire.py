"""The messages between trainer and supervisor on a call's socket: bytes with a length, and JSON of our own.

Nothing is unpickled, and only the supervisor, never the model's code, writes the reply's header.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass

HELLO = b"\1"
"""The first byte that a supervisor sends: from here on the call has a supervisor of its own."""
MAX_CODE_BYTES = 1 << 20
FILE_MARK = "\0file "
"""Before code that begins with a line of a path below HOME and a file's content, compressed, in base64. No code of a
model has a NUL."""
MAX_STREAM_BYTES = 64 << 20
"""Largest output stream that is accepted; the supervisor keeps fewer bytes with any setting."""
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True)
class Reply:
    """The end of a call. `status`: ok, error (exit code not 0), signal, killed, timeout, or the limit that was hit:
    cpu_limit, memory_limit, output_limit, disk_limit, file_limit, process_limit; sandbox_error is our own fault."""

    status: str
    exit_code: int | None = None
    """The exit code; if negative, the signal that ended the code."""
    stdout: str = ""
    stderr: str = ""
    wall_s: float = 0.0
    is_open: bool = False
    """True where the code ran in a session that goes on."""
    memory_bytes: int = 0
    """Memory that such a session keeps."""


def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Receive so many bytes. Raises EOFError if the other side ends before that."""
    received = bytearray()
    while len(received) < num_bytes:
        part = sock.recv(min(65536, num_bytes - len(received)))
        if not part:
            raise EOFError("the connection was closed")
        received += part
    return bytes(received)


def send_block(sock: socket.socket, data: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive_block(sock: socket.socket, max_bytes: int) -> bytes:
    """Receive what `send_block` sent. Raises EOFError, and ValueError for a length above `max_bytes`."""
    (num_bytes,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size))
    if num_bytes > max_bytes:
        raise ValueError(f"a block of {num_bytes} bytes; the limit is {max_bytes}")
    return receive_exactly(sock, num_bytes)


def call(sock: socket.socket, code: str, patience_s: float) -> Reply:
    """Send code, and return what came of it, for which the supervisor has `patience_s` from its hello on."""
    send_block(sock, code.encode())
    receive_exactly(sock, len(HELLO))
    sock.settimeout(patience_s)
    return receive_reply(sock)


def send_reply(sock: socket.socket, header: dict[str, object], stdout: bytes, stderr: bytes) -> None:
    for block in (json.dumps(header).encode(), stdout, stderr):
        send_block(sock, block)


def receive_reply(sock: socket.socket) -> Reply:
    header = json.loads(receive_block(sock, 4096))
    stdout, stderr = (receive_block(sock, MAX_STREAM_BYTES).decode("utf-8", "replace") for _ in range(2))
    return Reply(stdout=stdout, stderr=stderr, **header)
