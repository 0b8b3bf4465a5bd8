"""One HTTP request on one connection, to addresses checked against the policy.

Everything here blocks and runs on its own thread; `abort` may be called from any other thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import os
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from smokebox.egress.pattern import is_public

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.egress.urls import Url

T = TypeVar("T")
Resolver: TypeAlias = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a host and port."""

_CHUNK = 64 * 1024


class FetchFailed(Exception):
    """Request without a response, with curl's exit code. Never leaves the command."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Status line and headers of a response."""

    version: str
    status: int
    reason: str
    headers: Sequence[tuple[str, str]]

    def get(self, name: str) -> str | None:
        """Return the first header of that name, ignoring case."""
        return next((value for key, value in self.headers if key.lower() == name), None)


class FetchConnection:
    """Sends one request and reads its response.

    `place` is a host and port to connect to instead of those of the URL.
    """

    def __init__(
        self,
        url: Url,
        *,
        private: bool,
        place: tuple[str, int] | None = None,
        resolver: Resolver | None = None,
    ) -> None:
        self._resolver = resolver or _resolve
        self._url = url
        self._private = private
        self._host, self._port = place or (url.host, url.port)
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self._lock = threading.Lock()
        self._busy = False
        self._aborted = False

    def send(
        self, method: str, headers: Sequence[tuple[str, str]], body: bytes | None, timeout: float
    ) -> Head:
        """Resolve the host, connect, send the request, and read the head of the response."""
        with self._working(), _translated(self._url):
            self._socket = self._connect(timeout)
            self._socket.settimeout(None)
            wire = http.client.HTTPConnection(self._url.host, self._url.port)
            wire.sock = self._socket
            wire.putrequest(method, self._url.target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                wire.putheader(name, value)
            wire.endheaders(body)
            self._response = wire.getresponse()
        response = self._response
        return Head(
            version="1.0" if response.version == 10 else "1.1",
            status=response.status,
            reason=response.reason,
            headers=response.getheaders(),
        )

    def read(self) -> bytes:
        """Read part of the body as it arrives; empty at its end."""
        response = self._response
        if response is None:
            return b""
        with self._working(), _translated(self._url):
            data = response.read1(_CHUNK)
        if not data and response.length:
            raise FetchFailed(18, f"transfer closed with {response.length} bytes remaining to read")
        return data

    def abort(self) -> None:
        """Close the connection, which wakes a thread that blocks on it."""
        with self._lock:
            self._aborted = True
            busy = self._busy
        if not busy:
            self._close()
        elif self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        # Closing while another thread reads would wait for it, so the reader closes.
        with self._lock:
            self._busy = True
        try:
            yield
        finally:
            with self._lock:
                self._busy = False
                aborted = self._aborted
            if aborted:
                self._close()

    def _close(self) -> None:
        for held in (self._response, self._socket):
            if held is not None:
                with contextlib.suppress(OSError):
                    held.close()

    def _connect(self, timeout: float) -> socket.socket:
        failure: OSError = ConnectionRefusedError()
        for address in self._addresses():
            if self._aborted:
                raise FetchFailed(42, "aborted")
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            raw = self._socket = socket.socket(family, socket.SOCK_STREAM)
            try:
                raw.settimeout(timeout)
                raw.connect((address, self._port))
                return self._secure(raw)
            except OSError as error:
                raw.close()
                failure = error
        raise failure

    def _secure(self, raw: socket.socket) -> socket.socket:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._url.scheme == "http":
            return raw
        return _tls(os.environ.get("SSL_CERT_FILE")).wrap_socket(
            raw, server_hostname=self._url.host
        )

    def _addresses(self) -> list[str]:
        # Connect to the address that was checked: the name is never resolved a second time, when it
        # could give another address.
        host = self._host
        found = list(self._resolver(host, self._port))
        if not found:
            raise FetchFailed(6, f"Could not resolve host: {host}")
        if not self._private and not all(is_public(address) for address in found):
            entry = {self._url.host: next(one for one in found if not is_public(one))}
            raise FetchFailed(
                7, f"{host} resolves to a private address; allow it with hosts={entry}"
            )
        return found


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


@functools.cache
def _tls(ca_file: str | None) -> ssl.SSLContext:
    # OpenSSL itself reads the variable; the argument only keys the cache.
    return ssl.create_default_context()


@contextlib.contextmanager
def _translated(url: Url) -> Iterator[None]:
    """Translate errors of sockets, TLS and HTTP into curl's exit codes."""
    place = f"{url.host} port {url.port}"
    try:
        yield
    except socket.gaierror:
        raise FetchFailed(6, f"Could not resolve host: {url.host}") from None
    except ssl.SSLCertVerificationError as error:
        raise FetchFailed(60, f"SSL certificate problem: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise FetchFailed(35, f"TLS connect error with {place}: {error.reason}") from None
    except TimeoutError:
        raise FetchFailed(28, f"Failed to connect to {place}: timed out") from None
    except ConnectionRefusedError:
        raise FetchFailed(7, f"Failed to connect to {place}: connection refused") from None
    except http.client.RemoteDisconnected:
        raise FetchFailed(52, "Empty reply from server") from None
    except http.client.IncompleteRead:
        raise FetchFailed(18, "transfer closed with outstanding read data remaining") from None
    except http.client.HTTPException:
        raise FetchFailed(8, "Weird server reply") from None
    except OSError as error:
        raise FetchFailed(56, f"Failure with {place}: {error.strerror or 'closed'}") from None


async def blocking(work: Callable[[], T]) -> T:
    """Run `work` on its own daemon thread, so that a hanging one blocks nothing else."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[], None]) -> None:
        if not future.done():
            set_it()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            report = functools.partial(future.set_exception, error)
        else:
            report = functools.partial(future.set_result, result)
        # The loop may have closed while this thread was blocked.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, report)

    threading.Thread(target=run, daemon=True, name="smokebox-fetch").start()
    return await future
