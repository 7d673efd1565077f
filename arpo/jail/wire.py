"""The messages between trainer and supervisor on a call's socket: blocks of bytes with their lengths, and JSON.

Nothing is unpickled. Only the supervisor writes a reply's header, never the model's code.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass

HELLO = b"\1"
"""First byte from a supervisor. From then on the supervisor serves only this call."""
MAX_CODE_BYTES = 1 << 20
FILE_MARK = "\0file "
"""Prefix of code with a file in its first line: the path below HOME, and the content (compressed, base64). Code from a
model contains no NUL."""
MAX_STREAM_BYTES = 64 << 20
"""Largest accepted output stream. With any settings the supervisor keeps fewer bytes."""
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True)
class Reply:
    """The outcome of a call.

    `status`: ok, error (exit code not 0), signal, killed, timeout, or the limit that was hit: cpu_limit, memory_limit,
    output_limit, disk_limit, file_limit, process_limit. sandbox_error is an infrastructure error.
    """

    status: str
    exit_code: int | None = None
    """The exit code; if negative, the signal that ended the code."""
    stdout: str = ""
    stderr: str = ""
    wall_s: float = 0.0
    is_open: bool = False
    """True if the code ran in a session that continues."""
    memory_bytes: int = 0
    """Memory kept by this session"""


def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Receive `num_bytes` bytes. Raises EOFError if the other side ends earlier."""
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
    """Receive a block sent by `send_block`. Raises EOFError, and ValueError for a length above `max_bytes`."""
    (num_bytes,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size))
    if num_bytes > max_bytes:
        raise ValueError(f"a block of {num_bytes} bytes; the limit is {max_bytes}")
    return receive_exactly(sock, num_bytes)


def call(sock: socket.socket, code: str, patience_s: float) -> Reply:
    """Send code and return the reply. The supervisor has `patience_s` for the reply, starting with its hello."""
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
