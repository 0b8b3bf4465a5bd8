"""The real host of a repository, asked by the engine on behalf of a sandbox.

Every hop is judged by its address, and credentials go to one origin only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from typing import TYPE_CHECKING, Self

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from smokebox.errors import GitError, InvalidOption
from smokebox.sandbox.addresses import is_public
from smokebox.sandbox.urls import Url, join_url, parse_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping

    from smokebox.engine.git.repository import Repository

REFS = "/info/refs?service=git-upload-pack"
PACK = "/git-upload-pack"
# What git's own fetch speaks; anything else is a web page, or the protocol of old.
_TYPES = {
    REFS: "application/x-git-upload-pack-advertisement",
    PACK: "application/x-git-upload-pack-result",
}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 5
_CONNECT_SECONDS = 30.0
# A host that counts objects says every few seconds that it is still there.
_SILENT_SECONDS = 300.0
_PIECE = 1 << 18


class PrivateAddress(OSError):
    """A name that leads to an address which is not to be asked."""


class PublicResolver(AbstractResolver):
    """Gives the addresses of a name, and refuses those that lead inside.

    What it gives is what is connected to: nobody asks a second time, and gets another answer.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of a name, all of them public."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
        if not all(is_public(str(address[0])) for *_, address in found):
            raise PrivateAddress(host)
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=port,
                family=kind,
                proto=number,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, number, _, address in found
        ]

    async def close(self) -> None:
        """Nothing: it holds nothing."""


class Upstream:
    """The host of one repository. `async with`; all that goes wrong is an error of ours."""

    def __init__(self, repository: Repository, *, allow_private: bool = False) -> None:
        self._repository = repository
        self._private = allow_private
        self._base = str(repository.url).rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=None if self._private else PublicResolver(),
                use_dns_cache=False,
                limit=4,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS
            ),
            # What is compressed is passed on as it is.
            auto_decompress=False,
            read_bufsize=_PIECE,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    @contextlib.asynccontextmanager
    async def ask(
        self,
        method: str,
        tail: str,
        headers: Mapping[str, str],
        body: AsyncIterable[bytes] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that git can read, followed to where it is if nothing was sent."""
        url = parse_url(self._base + tail)
        for _ in range(_MOST_REDIRECTS + 1):
            with self._explained(url):
                answer = await self._send(method, url, headers, body)
            async with answer:
                if answer.status not in _REDIRECTS or body is not None:
                    self._check(answer, tail)
                    with self._explained(url):
                        yield answer
                    return
                url = self._next(url, answer, tail)
        raise self._failed(f"{self._shown} redirects more than {_MOST_REDIRECTS} times.")

    async def _send(
        self,
        method: str,
        url: Url,
        headers: Mapping[str, str],
        body: AsyncIterable[bytes] | None,
    ) -> aiohttp.ClientResponse:
        assert self._session is not None
        sent = dict(headers)
        credentials = self._repository.credentials
        if credentials is not None and url.origin == self._repository.url.origin:
            sent["Authorization"] = credentials.header
        # The resolver is not asked for what is an address already.
        if not self._private and _is_address(url.host) and not is_public(url.host):
            raise PrivateAddress(url.host)
        return await self._session.request(
            method, URL(str(url), encoded=True), headers=sent, data=body, allow_redirects=False
        )

    def _next(self, url: Url, answer: aiohttp.ClientResponse, tail: str) -> Url:
        """Where a redirect leads; what git asks for later is there too."""
        text = join_url(url, answer.headers.get("Location", ""))
        try:
            following = parse_url(text)
        except InvalidOption as error:
            raise self._failed(
                f"{self._shown} redirects to what is no http or https URL."
            ) from error
        if not str(following).endswith(tail):
            raise self._failed(
                f"{self._shown} redirects to {following.origin}, and not to a repository there.",
                "A host may do so to have somebody log in: pass password=, or another URL.",
            )
        self._base = str(following).removesuffix(tail)
        return following

    def _check(self, answer: aiohttp.ClientResponse, tail: str) -> None:
        status = answer.status
        if status in (401, 403):
            known = self._repository.credentials is not None
            raise GitError(
                f"the host of {self._shown} "
                + ("refuses these credentials" if known else "asks for credentials")
                + f" (HTTP {status}).",
                hint="Pass a token that may read the repository as password=. Some hosts "
                "answer so, too, where there is no such repository.",
                reason="authentication",
                url=self._shown,
                status=status,
            )
        if status in (404, 410):
            raise GitError(
                f"there is no repository at {self._shown} (HTTP {status}).",
                hint="Look at the URL. Some hosts say so of a private one, which takes password=.",
                reason="repository_not_found",
                url=self._shown,
                status=status,
            )
        if status >= 500 or status == 429:
            raise self._unreachable(f"the host of {self._shown} cannot answer (HTTP {status}).")
        if status != 200 or answer.content_type != _TYPES[tail]:
            raise self._failed(
                f"what is at {self._shown} does not answer as a git server (HTTP {status}).",
                "Pass the URL that `git clone` takes; it has to speak git's smart protocol.",
            )

    @contextlib.contextmanager
    def _explained(self, url: Url) -> Iterator[None]:
        """Turn what DNS, sockets, TLS and HTTP raise into errors of ours."""
        try:
            yield
        except PrivateAddress as error:
            raise self._refused(url) from error
        except aiohttp.ClientConnectorCertificateError as error:
            reason = getattr(error.certificate_error, "verify_message", "it is not trusted")
            raise self._unreachable(
                f"the certificate of {url.authority} cannot be verified: {reason}."
            ) from error
        except aiohttp.ClientSSLError as error:
            raise self._unreachable(f"no TLS connection to {url.authority} can be made.") from error
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, PrivateAddress):
                raise self._refused(url) from error
            raise self._unreachable(
                f"{url.authority} cannot be reached: {_words(error.os_error)}."
            ) from error
        except TimeoutError as error:
            raise self._unreachable(f"{url.authority} does not answer.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(f"the connection to {url.authority} broke off.") from error

    @property
    def _shown(self) -> str:
        return str(self._repository.url)

    def _refused(self, url: Url) -> InvalidOption:
        return InvalidOption(
            f"{url.origin} does not lead to a public address, so nothing was asked of it.",
            hint="Pass allow_private=True where repositories inside this network may be cloned.",
            option="allow_private",
            value=False,
        )

    def _unreachable(self, message: str) -> GitError:
        return GitError(
            message,
            hint="Try again, or look at the host and the network of this machine.",
            reason="network",
            url=self._shown,
        )

    def _failed(self, message: str, hint: str = "Pass the URL that it leads to.") -> GitError:
        return GitError(message, hint=hint, reason="failed", url=self._shown)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _words(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "its name is not known"
    if isinstance(error, ConnectionRefusedError):
        return "it refuses connections"
    if isinstance(error, ssl.SSLError):
        return "TLS failed"
    return (error.strerror or "no connection").lower()
