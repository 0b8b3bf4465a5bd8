"""The HTTP server of a repository, as the engine talks to it on behalf of a sandbox.

The address of every hop is checked, and credentials go to one origin only.
"""

from __future__ import annotations

import contextlib
import ssl
from typing import TYPE_CHECKING

from smokebox.egress.address_guard import AddressGuard, PrivateAccess
from smokebox.egress.urls import Url, join_url, parse_url
from smokebox.errors import GitError, InvalidOption
from smokebox.foundation.http1.client import (
    ClientRequest,
    ClientResponse,
    RequestBodyFailed,
    send,
)
from smokebox.foundation.http1.connection import ConnectionLost
from smokebox.foundation.http1.dial import AddressRefused, Dialer, Endpoint, UnknownHost
from smokebox.foundation.http1.head import Fields, MalformedMessage, write_request
from smokebox.foundation.http1.pool import ConnectionPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from smokebox.engine.git.repository import Repository
    from smokebox.foundation.http1.body import BodyReader
    from smokebox.foundation.http1.dial import Resolver

REFS = "/info/refs?service=git-upload-pack"
PACK = "/git-upload-pack"
# The smart protocol of git's own fetch. Anything else is a web page, or the old protocol.
_TYPES = {
    REFS: "application/x-git-upload-pack-advertisement",
    PACK: "application/x-git-upload-pack-result",
}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 5
_CONNECT_SECONDS = 30.0
# A server that counts objects sends a sign of life every few seconds.
_SILENCE_SECONDS = 300.0


class RequestAborted(Exception):
    """Git closed the connection, or broke the protocol, before its request was sent."""


class GitRemote:
    """The server of one repository. `close` it; every failure is a `SmokeboxError`."""

    def __init__(
        self,
        repository: Repository,
        *,
        allow_private: PrivateAccess = False,
        resolver: Resolver | None = None,
    ) -> None:
        self._repository = repository
        self._base = str(repository.url).rstrip("/")
        self._pool = ConnectionPool()
        self._dialer = Dialer(
            is_allowed=AddressGuard.of(allow_private, option="allow_private").allows,
            timeout=_SILENCE_SECONDS,
            connect_timeout=_CONNECT_SECONDS,
            resolver=resolver,
        )

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, fields: Fields, body: BodyReader | None = None
    ) -> AsyncIterator[ClientResponse]:
        """Send a request for a path below the repository.

        The response is one that git can read. Redirects are followed if there is no body.

        Raises:
            RequestAborted: The body could not be read.
            GitError: There is no usable response, or only a part of one.
            InvalidOption: The server is at a private address.
        """
        url = parse_url(self._base + path)
        for _ in range(_MAX_REDIRECTS + 1):
            with self._explained(url):
                response = await self._send(method, url, fields, body)
            try:
                if response.status not in _REDIRECTS or body is not None:
                    self._check(response, path)
                    with self._explained(url):
                        yield response
                    return
                url = self._follow(url, response, path)
            finally:
                response.release()
        raise self._failed(f"{self._shown} redirects more than {_MAX_REDIRECTS} times.")

    async def _send(
        self, method: str, url: Url, fields: Fields, body: BodyReader | None
    ) -> ClientResponse:
        fields = [("Host", url.authority), *fields]
        credentials = self._repository.credentials
        if credentials is not None and url.origin == self._repository.url.origin:
            fields.append(("Authorization", credentials.header))
        framing = 0 if body is None else body.framing
        if framing == "chunked":
            fields.append(("Transfer-Encoding", "chunked"))
        elif body is not None:
            fields.append(("Content-Length", str(framing)))
        endpoint = Endpoint(url.host, url.port, url.scheme == "https")
        request = ClientRequest(
            method=method,
            head=write_request(method, url.target, fields),
            body=b"" if body is None else body,
            framing=framing,
        )
        return await send(self._pool, endpoint, lambda: self._dialer.connect(endpoint), request)

    def _follow(self, url: Url, response: ClientResponse, path: str) -> Url:
        """Return the URL of a redirect, which later requests start from."""
        text = join_url(url, _header(response, "location"))
        try:
            following = parse_url(text)
        except InvalidOption as error:
            raise self._failed(
                f"{self._shown} redirects to a URL that is not http or https."
            ) from error
        if not str(following).endswith(path):
            raise self._failed(
                f"{self._shown} redirects to {following.origin}, and not to a repository there.",
                "Servers do that to ask for a login: pass password=, or another URL.",
            )
        self._base = str(following).removesuffix(path)
        return following

    def _check(self, response: ClientResponse, path: str) -> None:
        status = response.status
        if status in (401, 403):
            known = self._repository.credentials is not None
            raise GitError(
                f"the server of {self._shown} "
                + ("refuses these credentials" if known else "asks for credentials")
                + f" (HTTP {status}).",
                hint="Pass a token that may read the repository as password=. Some servers "
                "respond like this if the repository does not exist.",
                reason="authentication",
                url=self._shown,
                status=status,
            )
        if status in (404, 410):
            raise GitError(
                f"there is no repository at {self._shown} (HTTP {status}).",
                hint="Check the URL. Some servers hide private repositories like this: pass "
                "password=.",
                reason="repository_not_found",
                url=self._shown,
                status=status,
            )
        if status >= 500 or status == 429:
            raise self._unreachable(f"the server of {self._shown} failed (HTTP {status}).")
        kind = _header(response, "content-type").partition(";")[0].strip().lower()
        if status != 200 or kind != _TYPES[path]:
            raise self._failed(
                f"{self._shown} does not respond as a git server (HTTP {status}).",
                "Pass the URL that `git clone` takes; the server has to speak git's smart "
                "protocol.",
            )

    @contextlib.contextmanager
    def _explained(self, url: Url) -> Iterator[None]:
        """Turn errors of DNS, sockets, TLS and HTTP into a `SmokeboxError`."""
        try:
            yield
        except RequestBodyFailed as failure:
            raise RequestAborted from failure
        except AddressRefused as error:
            raise InvalidOption(
                f"{url.origin} does not lead to a public address of another host, so it was not "
                "contacted.",
                hint="The operator of the server can grant it: private in the table [network] of "
                "server.toml. In the engine, pass allow_private=True.",
                option="allow_private",
                value=False,
            ) from error
        except UnknownHost as error:
            raise self._unreachable(
                f"{url.authority} cannot be reached: its name is not known."
            ) from error
        except ssl.SSLCertVerificationError as error:
            reason = error.verify_message or "it is not trusted"
            raise self._unreachable(
                f"the certificate of {url.authority} cannot be verified: {reason}."
            ) from error
        except ssl.SSLError as error:
            raise self._unreachable(f"TLS with {url.authority} failed.") from error
        except TimeoutError as error:
            raise self._unreachable(f"{url.authority} does not respond.") from error
        except (ConnectionLost, MalformedMessage) as error:
            raise self._unreachable(f"the connection to {url.authority} broke off.") from error
        except ConnectionRefusedError as error:
            raise self._unreachable(
                f"{url.authority} cannot be reached: it refuses connections."
            ) from error
        except OSError as error:
            reason = (error.strerror or "no connection").lower()
            raise self._unreachable(f"{url.authority} cannot be reached: {reason}.") from error

    @property
    def _shown(self) -> str:
        return str(self._repository.url)

    def _unreachable(self, message: str) -> GitError:
        return GitError(
            message,
            hint="Try again, or check the server and the network of this machine.",
            reason="network",
            url=self._shown,
        )

    def _failed(self, message: str, hint: str = "Pass the URL that it leads to.") -> GitError:
        return GitError(message, hint=hint, reason="failed", url=self._shown)


def _header(response: ClientResponse, name: str) -> str:
    return next((value for key, value in response.fields if key.lower() == name), "")
