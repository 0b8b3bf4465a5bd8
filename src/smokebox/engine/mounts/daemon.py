"""The process that serves one mounted bucket, beside the sandbox and as its user outside.

It outlives the engine, and ends when nobody has the bucket mounted any more. Credentials
reach it on its standard input, and leave it only as signatures.
"""

from __future__ import annotations

import base64
import contextlib
import encodings.idna  # noqa: F401
import errno
import hmac
import json
import os
import secrets
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from smokebox.egress.pattern import is_public
from smokebox.engine.jail import linux
from smokebox.engine.mounts.attachment import Attachment, MountPoint, detach
from smokebox.engine.mounts.fuse_server import FuseServer
from smokebox.engine.mounts.inodes import Spool
from smokebox.engine.mounts.volume import Volume
from smokebox.errors import (
    Conflict,
    InvalidOption,
    ServiceUnavailable,
    SmokeboxError,
    from_os_error,
)
from smokebox.sandbox.access import Access
from smokebox.sandbox.filesystems.bucket import BucketFilesystem
from smokebox.sandbox.stores import open_target
from smokebox.wire.failure import failure_of

if TYPE_CHECKING:
    from collections.abc import Callable


# Looked for when a name is first resolved, by when this process may not read it any more.


CACHE_BYTES = 32 << 20
# How long what was listed is believed, in seconds.
HOLDS = 5.0


def main() -> None:
    """Do what the message on standard input says, and say how that went."""
    words = json.loads(sys.stdin.buffer.read())
    with socket.socket(fileno=words["report"]) as report:
        try:
            if words["task"] == "unmount":
                detach(_place(words), lazy=words["lazy"])
                report.send(b"{}")
                return
            # The process that was started ends, so that the engine need not wait for this one.
            if os.fork():
                return
            server, volume = _mount(words)
            report.send(json.dumps({"pid": os.getpid()}).encode())
        except SmokeboxError as error:
            _refuse(report, error)
            return
        except OSError as error:
            _refuse(report, _explained(error, words["path"]))
            return
    server.run(volume)
    os._exit(0)


def _mount(words: dict[str, Any]) -> tuple[FuseServer, Volume]:
    linux.set_process_name("smokebox-mount")
    attaching = Attachment(_place(words), read_only=words["read_only"])
    try:
        if words["mapped"]:
            os.setgroups([])
            os.setresgid(words["gid"], words["gid"], words["gid"])
            os.setresuid(words["uid"], words["uid"], words["uid"])
        linux.set_dumpable(False)
        if not words["private"]:
            check_public(words["access"]["endpoint"])
            lead_outside()
        target = open_target(words["bucket"], words["prefix"], Access(**words["access"]))
        bucket = BucketFilesystem(
            target.store,
            target.prefix,
            read_only=words["read_only"],
            cache_bytes=CACHE_BYTES,
            place=target.place,
        )
        if words["check"]:
            bucket.refresh()
        bucket.serve(HOLDS)
    except BaseException:
        attaching.leave()
        raise
    # Inside, root of the sandbox; outside, who that is there.
    uid, gid = (words["uid"], words["gid"]) if words["mapped"] else (0, 0)
    server = FuseServer(attaching.make(), uid=uid, gid=gid)
    spool = Spool(words["spool"], words["room"])
    return server, Volume(bucket, spool, server.invalidate)


def _place(words: dict[str, Any]) -> MountPoint:
    return MountPoint(
        user=words["user"],
        mounts=words["mounts"],
        root=words["root"],
        path=words["path"],
        mapped=words["mapped"],
    )


def _explained(error: OSError, path: str) -> SmokeboxError:
    if error.errno == errno.EBUSY:
        return Conflict(
            f"{path} is in use in the sandbox.",
            hint="End what has files open or works there, or pass force=True.",
            kind="mount",
            name=path,
        )
    return from_os_error(error, path)


def _refuse(report: socket.socket, error: SmokeboxError) -> None:
    report.send(msgspec.json.encode(failure_of(error)))


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
