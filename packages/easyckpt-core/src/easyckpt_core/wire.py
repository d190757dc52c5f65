"""Messages between trainers and keeper: one JSON object a packet, with file descriptors beside it.

The socket is AF_UNIX, SOCK_SEQPACKET: packets keep their bounds, nothing is framed by hand, and no
TCP port is taken. Only JSON crosses the boundary, so the keeper needs neither torch nor the user's
classes.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

MAX_PACKET_BYTES = 1 << 17
_MAX_FDS = 16

Message = dict[str, Any]


def new_socket() -> socket.socket:
    """Return an unconnected packet socket that holds at least one packet of the largest size."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
    return sock


def send(sock: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> None:
    """Send one message; blocks at most for the socket's timeout.

    Raises:
        OSError: the peer is gone, or the message is larger than a packet.
    """
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_PACKET_BYTES:
        raise OSError(f"message {message.get('op')!r} has {len(data)} bytes, over the packet limit")
    if fds:
        socket.send_fds(sock, [data], list(fds))
    else:
        sock.send(data)


def receive(sock: socket.socket) -> tuple[Message, list[int]]:
    """Return the next message and its descriptors (close-on-exec), which the caller owns.

    Raises:
        ConnectionError: the peer has closed its end.
    """
    data, fds, _flags, _address = socket.recv_fds(sock, MAX_PACKET_BYTES, _MAX_FDS)
    if not data:
        raise ConnectionResetError("the peer has closed the connection")
    for fd in fds:
        os.set_inheritable(fd, False)
    return json.loads(data), fds


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end, as the kernel knows them."""
    layout = struct.Struct("3i")
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    pid, uid, _gid = layout.unpack(raw)
    return pid, uid
