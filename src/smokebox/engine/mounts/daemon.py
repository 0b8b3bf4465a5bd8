"""The process that serves one mounted bucket, outside the sandbox, as the user that owns it.

It outlives the engine, and ends with the mount. It reads credentials from its standard input, and
sends them nowhere except as signatures.
"""

from __future__ import annotations

import base64
import contextlib

# Imported on the first name resolution otherwise, when this process may no longer read it.
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

from smokebox.egress.address_guard import AddressGuard
from smokebox.engine.jail import linux
from smokebox.engine.mounts.fuse_mount import MountPoint, PendingMount, unmount
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
    from typing import TypeAlias

    AddressCheck: TypeAlias = Callable[[str, int], bool]

CACHE_BYTES = 32 << 20
# Time for which cached listings are valid.
LISTING_SECONDS = 5.0
CONNECT_SECONDS = 10.0

_MAX_HEAD = 1 << 16
_CHUNK = 1 << 18
_PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
_OTHER_PROXY_VARIABLES = ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy")


def main() -> None:
    """Run the task in the message on standard input, and send a reply."""
    message = json.loads(sys.stdin.buffer.read())
    with socket.socket(fileno=message["reply"]) as reply:
        try:
            if message["task"] == "unmount":
                unmount(_mount_point(message), lazy=message["lazy"])
                reply.send(b"{}")
                return
            # The process that the engine started ends, so that the daemon is not its child.
            if os.fork():
                return
            server, volume = _mount(message)
            reply.send(json.dumps({"pid": os.getpid()}).encode())
        except SmokeboxError as error:
            _send_error(reply, error)
            return
        except OSError as error:
            _send_error(reply, _translate(error, message["path"]))
            return
    server.run(volume)
    os._exit(0)


def _mount(message: dict[str, Any]) -> tuple[FuseServer, Volume]:
    linux.set_process_name("smokebox-mount")
    pending = PendingMount(_mount_point(message), read_only=message["read_only"])
    try:
        if message["mapped"]:
            os.setgroups([])
            os.setresgid(message["gid"], message["gid"], message["gid"])
            os.setresuid(message["uid"], message["uid"], message["uid"])
        linux.set_dumpable(False)
        if message["private"] is not True:
            guard = AddressGuard.of(message["private"])
            check_endpoint(message["access"]["endpoint"], guard.allows_address)
            use_guarded_proxy(guard.allows_address)
        target = open_target(message["bucket"], message["prefix"], Access(**message["access"]))
        bucket = BucketFilesystem(
            target.store,
            target.prefix,
            read_only=message["read_only"],
            cache_bytes=CACHE_BYTES,
            label=target.label,
        )
        if message["check"]:
            bucket.refresh()
        bucket.serve(LISTING_SECONDS)
    except BaseException:
        pending.cancel()
        raise
    # The owner of all files, as seen outside: root of the sandbox.
    uid, gid = (message["uid"], message["gid"]) if message["mapped"] else (0, 0)
    server = FuseServer(pending.mount(), uid=uid, gid=gid)
    spool = Spool(message["spool"], message["spool_limit"])
    return server, Volume(bucket, spool, server.invalidate)


def _mount_point(message: dict[str, Any]) -> MountPoint:
    return MountPoint(
        user_namespace=message["user_namespace"],
        mount_namespace=message["mount_namespace"],
        root=message["root"],
        path=message["path"],
        mapped=message["mapped"],
    )


def _translate(error: OSError, path: str) -> SmokeboxError:
    if error.errno == errno.EBUSY:
        return Conflict(
            f"{path} is in use in the sandbox.",
            hint="End the processes with open files or a working directory there, or pass "
            "force=True.",
            kind="mount",
            name=path,
        )
    return from_os_error(error, path)


def _send_error(reply: socket.socket, error: SmokeboxError) -> None:
    reply.send(msgspec.json.encode(failure_of(error)))


def use_guarded_proxy(is_allowed: AddressCheck) -> None:
    """Make HTTP clients of this process that are created later reach allowed addresses only.

    They use a proxy in this process, which checks the address of every connection.
    """
    secret = secrets.token_hex(16)
    listener = socket.create_server(("127.0.0.1", 0))
    credentials = base64.b64encode(f"smokebox:{secret}".encode())
    threading.Thread(
        target=_accept,
        args=(listener, b"Basic " + credentials, is_allowed),
        name="smokebox-proxy",
        daemon=True,
    ).start()
    url = f"http://smokebox:{secret}@127.0.0.1:{listener.getsockname()[1]}"
    os.environ.update(dict.fromkeys(_PROXY_VARIABLES, url))
    for name in _OTHER_PROXY_VARIABLES:
        os.environ.pop(name, None)


def check_endpoint(endpoint: str | None, is_allowed: AddressCheck) -> None:
    """Raise for an endpoint at an address that is not allowed, with a hint how it can be."""
    url = urlsplit(endpoint or "")
    try:
        if url.hostname:
            _resolve(url.hostname, url.port or 80, is_allowed)
    except PermissionError as error:
        raise InvalidOption(
            f"{endpoint} does not lead to a public address of another host, so it was not "
            "contacted.",
            hint="The operator of the server can grant it: private in the table [network] of "
            "server.toml.",
            option="endpoint",
            value=endpoint,
        ) from error
    except OSError as error:
        raise ServiceUnavailable(
            f"{endpoint} cannot be reached: its name is not known.",
            hint="Check the endpoint, then try again.",
            service=str(endpoint),
        ) from error


def _accept(listener: socket.socket, authorization: bytes, is_allowed: AddressCheck) -> None:
    while True:
        client, _ = listener.accept()
        threading.Thread(
            target=_proxy,
            args=(client, authorization, is_allowed),
            name="smokebox-proxy",
            daemon=True,
        ).start()


def _proxy(client: socket.socket, authorization: bytes, is_allowed: AddressCheck) -> None:
    with client, contextlib.suppress(OSError, ValueError):
        head, rest = _read_head(client)
        line, *fields = head.split(b"\r\n")
        if not any(_is_authorized(field, authorization) for field in fields):
            client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            return
        method, target, _ = line.decode("latin-1").split(" ", 2)
        is_tunnel = method == "CONNECT"
        url = urlsplit(f"//{target}" if is_tunnel else target)
        try:
            server = _connect(url.hostname or "", url.port or 80, is_allowed)
        except PermissionError:
            client.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
            return
        except OSError:
            client.sendall(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")
            return
        with server:
            if is_tunnel:
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            else:
                # The credentials are for this proxy only.
                kept = [field for field in fields if not _is_authorized(field, authorization)]
                server.sendall(b"\r\n".join([line, *kept]) + b"\r\n\r\n")
            server.sendall(rest)
            responses = threading.Thread(target=_relay, args=(server, client), daemon=True)
            responses.start()
            _relay(client, server)
            responses.join()


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data and len(data) < _MAX_HEAD:
        chunk = client.recv(_CHUNK)
        if not chunk:
            break
        data += chunk
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _is_authorized(field: bytes, authorization: bytes) -> bool:
    name, _, value = field.partition(b":")
    return name.lower() == b"proxy-authorization" and hmac.compare_digest(
        value.strip(), authorization
    )


def _connect(host: str, port: int, is_allowed: AddressCheck) -> socket.socket:
    for address in _resolve(host, port, is_allowed):
        with contextlib.suppress(OSError):
            server = socket.create_connection((address, port), CONNECT_SECONDS)
            server.settimeout(None)
            return server
    raise ConnectionRefusedError(f"{host} does not respond")


def _resolve(host: str, port: int, is_allowed: AddressCheck) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(info[4][0]) for info in found if is_allowed(str(info[4][0]), port)]
    if found and not addresses:
        raise PermissionError(f"{host} has only private addresses")
    return addresses


def _relay(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(_CHUNK):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
