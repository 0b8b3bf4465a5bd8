"""A way out for the client of a store that leads to public addresses only.

Where a bucket is comes from whoever asks for it, and so do redirections from there: neither
may lead this host to what only it can reach. So all of it goes by a proxy of this process,
which resolves names itself and connects to what it has checked.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import secrets
import socket
import threading
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from smokebox.errors import InvalidOption, ServiceUnavailable
from smokebox.sandbox.addresses import is_public

if TYPE_CHECKING:
    from collections.abc import Callable

CONNECT_SECONDS = 10.0

_LONGEST_HEAD = 1 << 16
_PIECE = 1 << 18
_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
_DIRECT = ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy")


def lead_outside(allowed: Callable[[str], bool] = is_public) -> None:
    """Have every HTTP client of this process that is made from here on go this way."""
    secret = secrets.token_hex(16)
    listener = socket.create_server(("127.0.0.1", 0))
    word = "Basic " + base64.b64encode(f"smokebox:{secret}".encode()).decode()
    threading.Thread(
        target=_listen, args=(listener, word.encode(), allowed), name="smokebox-way", daemon=True
    ).start()
    url = f"http://smokebox:{secret}@127.0.0.1:{listener.getsockname()[1]}"
    os.environ.update(dict.fromkeys(_VARIABLES, url))
    for name in _DIRECT:
        os.environ.pop(name, None)


def check_public(endpoint: str | None) -> None:
    """Say at once of an address that it is not to be asked, and how it can be."""
    url = urlsplit(endpoint or "")
    try:
        if url.hostname:
            _checked(url.hostname, url.port or 80, is_public)
    except PermissionError as error:
        raise InvalidOption(
            f"{endpoint} does not lead to a public address, so nothing was asked of it.",
            hint="Whoever runs the server can allow that: smokebox serve --bucket-private.",
            option="endpoint",
            value=endpoint,
        ) from error
    except OSError as error:
        raise ServiceUnavailable(
            f"{endpoint} cannot be reached: its name is not known.",
            hint="Check the endpoint, then try again.",
            service=str(endpoint),
        ) from error


def _listen(listener: socket.socket, word: bytes, allowed: Callable[[str], bool]) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(
            target=_carry, args=(connection, word, allowed), name="smokebox-way", daemon=True
        ).start()


def _carry(connection: socket.socket, word: bytes, allowed: Callable[[str], bool]) -> None:
    with connection, contextlib.suppress(OSError, ValueError):
        head, rest = _head(connection)
        line, *fields = head.split(b"\r\n")
        if not any(_opens(field, word) for field in fields):
            connection.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            return
        method, target, _ = line.decode("latin-1").split(" ", 2)
        connects = method == "CONNECT"
        url = urlsplit(f"//{target}" if connects else target)
        try:
            outside = _connected(url.hostname or "", url.port or 80, allowed)
        except PermissionError:
            connection.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
            return
        except OSError:
            connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")
            return
        with outside:
            if connects:
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            else:
                # What opens this way is for nobody further on.
                kept = [line, *(field for field in fields if not _opens(field, word))]
                outside.sendall(b"\r\n".join(kept) + b"\r\n\r\n")
            outside.sendall(rest)
            back = threading.Thread(target=_relay, args=(outside, connection), daemon=True)
            back.start()
            _relay(connection, outside)
            back.join()


def _head(connection: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data and len(data) < _LONGEST_HEAD:
        piece = connection.recv(_PIECE)
        if not piece:
            break
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _opens(field: bytes, word: bytes) -> bool:
    name, _, value = field.partition(b":")
    return name.lower() == b"proxy-authorization" and hmac.compare_digest(value.strip(), word)


def _connected(host: str, port: int, allowed: Callable[[str], bool]) -> socket.socket:
    for address in _checked(host, port, allowed):
        with contextlib.suppress(OSError):
            outside = socket.create_connection((address, port), CONNECT_SECONDS)
            outside.settimeout(None)
            return outside
    raise ConnectionRefusedError(f"{host} does not answer")


def _checked(host: str, port: int, allowed: Callable[[str], bool]) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(one[4][0]) for one in found if allowed(str(one[4][0]))]
    if found and not addresses:
        raise PermissionError(f"{host} leads inside")
    return addresses


def _relay(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
