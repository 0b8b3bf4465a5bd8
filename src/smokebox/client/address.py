"""Addresses of servers: URLs, and unix sockets of state directories."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

# sun_path has 108 bytes, including the terminating zero.
_MAX_SOCKET_PATH = 107
_LOCAL_CONNECT_SECONDS = 5.0
_NEXT_ADDRESS_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server.

    `base` is the URL without credentials, to which paths are appended; `socket` is the path of
    a unix socket; `login` is the "user:password" of the URL.
    """

    base: str
    socket: str | None = None
    login: str | None = None

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse `http://host:port`, `https://host` or `unix:/path/to/server.sock`.

        Raises:
            InvalidOption: It has another form.
        """
        if url.startswith("unix:") and (path := url.removeprefix("unix:").removeprefix("//")):
            return cls("http://localhost", os.path.abspath(path))
        if url.startswith(("http://", "https://")) and _has_host(url):
            parts = urlsplit(url.rstrip("/"))
            login, _, host = parts.netloc.rpartition("@")
            return cls(f"{parts.scheme}://{host}{parts.path}", login=unquote(login) or None)
        raise InvalidOption(
            f"{url!r} is not the address of a server.",
            hint="Pass http://host:port, https://host, or unix:/path/to/server.sock.",
            option="url",
            value=url,
        )

    def tcp_options(self) -> dict[str, Any]:
        """Return the options of `create_connection` of the running event loop."""
        parts = urlsplit(self.base)
        secure = parts.scheme == "https"
        options: dict[str, Any] = {
            "host": parts.hostname,
            "port": parts.port or (443 if secure else 80),
            "ssl": tls_context() if secure else None,
        }
        if isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
            # One of several addresses may be unreachable. uvloop has no such option.
            options["happy_eyeballs_delay"] = _NEXT_ADDRESS_SECONDS
        return options

    def __str__(self) -> str:
        return self.base if self.socket is None else f"unix:{self.socket}"


@functools.cache
def tls_context() -> ssl.SSLContext:
    """Return the default TLS context, cached: loading the certificates outlasts a request."""
    import ssl

    return ssl.create_default_context()


@contextlib.contextmanager
def short_socket_path(path: str) -> Iterator[str]:
    """Yield a path to a unix socket that fits into `sun_path`."""
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        yield path
        return
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)


def is_listening(path: str) -> bool:
    """Return whether a process listens on a unix socket."""
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
        sock.settimeout(_LOCAL_CONNECT_SECONDS)
        with short_socket_path(path) as name:
            sock.connect(name)
        return True
    return False


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
