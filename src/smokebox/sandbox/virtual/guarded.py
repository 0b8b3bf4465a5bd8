"""Requests under an `Egress` policy, judged and handled as those of a Linux sandbox are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from multidict import CIMultiDict

from smokebox.egress import message
from smokebox.egress.environment import Secrets
from smokebox.egress.handler import Refused, run_handler
from smokebox.egress.importing import find_handler
from smokebox.egress.meter import Meter
from smokebox.egress.pattern import HostPort
from smokebox.egress.scrub import Scrubber, secrets_in, secrets_in_query
from smokebox.errors import InvalidOption
from smokebox.sandbox.network import Network
from smokebox.sandbox.urls import Url, parse_url
from smokebox.sandbox.virtual.connection import Connection, FetchFailed, Head, blocking
from smokebox.sandbox.virtual.fetch import (
    Request,
    Response,
    Sent,
    check_request,
    following,
    pieces_of,
    read_body,
    scrubbed,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Mapping

    from smokebox.egress.policy import Egress, Verdict

DECIDE_SECONDS = 30.0
_NOT_FOUND = 7
# With secrets to look for, the answer must be readable, and whole.
_UNREADABLE = frozenset({"accept-encoding", "if-range", "range"})
_FRAMING = frozenset({"connection", "content-length", "host", "transfer-encoding"})
# What a policy of this kind does not say: sizes and times.
_BOUNDS = Network()

_log = logging.getLogger("smokebox.egress")


class Guarded:
    """A policy, and how much of what it allows one sandbox has used."""

    def __init__(self, policy: Egress) -> None:
        self.policy = policy
        self.meter = Meter(lambda: policy)
        self.env = Secrets()
        self.sandbox_id = f"virtual-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True)
class _Answer:
    head: Head
    body: AsyncIterable[bytes]


@contextlib.asynccontextmanager
async def fetch_guarded(guarded: Guarded, request: Request) -> AsyncIterator[Response]:
    """As `fetch`, under an `Egress`. Each hop is judged by itself."""
    check_request(_BOUNDS, request)
    limit = min(request.timeout or _BOUNDS.timeout, _BOUNDS.timeout)
    hops: list[Sent] = []
    hop: _Hop | None = None
    try:
        async with asyncio.timeout(limit):
            while True:
                hop = _Hop(guarded, request)
                sent, answer = await hop.ask()
                hops.append(scrubbed(sent, hop.scrubber))
                after = following(request, sent)
                if after is None:
                    break
                if len(hops) > min(request.redirects or 0, _BOUNDS.max_redirects):
                    raise FetchFailed(47, f"Maximum ({len(hops) - 1}) redirects followed")
                request = after
                hop.abort()
            decode = request.decode or hop.secret
            pieces = _counted(guarded, answer.body)
            body = read_body(_BOUNDS, pieces, answer.head, hop.scrubber, decode)
            async with contextlib.aclosing(body):
                yield Response(hops=hops, body=body)
    except FetchFailed as error:
        told = str(error) if hop is None else hop.scrubber.text(str(error))
        raise FetchFailed(error.exit_code, told) from None
    except TimeoutError:
        raise FetchFailed(28, f"Operation timed out after {limit:g} seconds") from None
    finally:
        if hop is not None:
            hop.abort()


class _Hop:
    """One request on its way out; the `Context` of the handler that it meets."""

    def __init__(self, guarded: Guarded, request: Request) -> None:
        self.sandbox_id = guarded.sandbox_id
        self.rule = ""
        self._guarded = guarded
        self._request = request
        self._url = _parsed(request.url)
        self._secrets: set[str] = set()
        self._connections: list[Connection] = []

    @property
    def secret(self) -> bool:
        """Whether a handler has added what must not be seen."""
        return bool(self._secrets)

    @property
    def scrubber(self) -> Scrubber:
        """What takes that out of the answer."""
        return Scrubber(self._secrets)

    async def ask(self) -> tuple[Sent, _Answer]:
        """What was asked, as the script may see it, and the answer."""
        request, url = self._request, self._url
        verdict = self._judge()
        visible = [("Host", url.authority), *request.headers]
        if request.body is not None:
            visible.append(("Content-Length", str(len(request.body))))
        asked = message.Request(
            request.method, str(url), CIMultiDict(request.headers), request.body or b""
        )
        if verdict.handler is None:
            answer = await self._send(asked, None)
        else:
            answer = await self._handle(verdict, asked)
        sent = Sent(method=request.method, url=url, headers=visible, head=answer.head)
        return sent, answer

    async def forward(self, request: message.Request, *, to: str | None = None) -> message.Response:
        """Of `Context`: send the request, and give the answer as it comes."""
        answer = await self._send(request, to)
        headers = CIMultiDict(answer.head.headers)
        return message.Response(message.Body(answer.body), answer.head.status, headers)

    def abort(self) -> None:
        """Close all that was opened."""
        for connection in self._connections:
            connection.abort()

    def _judge(self) -> Verdict:
        policy, url = self._guarded.policy, self._url
        verdict = policy.decide(url.host, url.port, sni=url.scheme == "https")
        if verdict.action == "refuse":
            raise FetchFailed(_NOT_FOUND, verdict.reason)
        if reason := self._guarded.meter.admit():
            raise FetchFailed(_NOT_FOUND, reason)
        self.rule = verdict.rule
        return verdict

    async def _handle(self, verdict: Verdict, asked: message.Request) -> _Answer:
        assert verdict.handler is not None
        try:
            async with asyncio.timeout(DECIDE_SECONDS):
                handler = find_handler(verdict.handler)
                made = await run_handler(handler, asked, self._guarded.env, self)
            if isinstance(made, message.Request):
                return await self._send(made, None)
            return _Answer(_head(made.status, made.headers), made.body)
        except FetchFailed:
            raise
        except Refused as error:
            return _refusal(403, str(error) or "the handler refused")
        except TimeoutError:
            return _refusal(504, f"the handler did not decide within {DECIDE_SECONDS:.0f} s")
        except Exception as error:
            # Its words may hold what it was about to send: only its kind is told.
            _log.warning("a handler failed", exc_info=error)
            return _refusal(502, f"the handler failed with {type(error).__name__}")

    async def _send(self, request: message.Request, to: str | None) -> _Answer:
        url = _parsed(request.url)
        place, private = self._place(url)
        if to is not None:
            base = _parsed(to)
            path = base.path.rstrip("/") + url.path
            url = Url(base.scheme, base.host, base.port, path, url.query)
            place, private = None, True
        body = await request.read()
        headers = self._headers(request)
        if body or self._request.body is not None:
            headers.append(("Content-Length", str(len(body))))
        self._count(len(body))
        connection = Connection(_BOUNDS, url, private=private, place=place)
        self._connections.append(connection)
        most = _BOUNDS.connect_timeout
        wait = min(self._request.connect_timeout or most, most)
        wire = [("Host", url.authority), *headers, ("Connection", "close")]
        try:
            head = await blocking(lambda: connection.send(request.method, wire, body or None, wait))
        except ValueError:
            raise FetchFailed(43, "a header holds characters that cannot be sent") from None
        return _Answer(head, pieces_of(connection))

    def _place(self, url: Url) -> tuple[tuple[str, int] | None, bool]:
        """Where the policy says that a host is, which may be private."""
        address = self._guarded.policy.decide(url.host, url.port).address
        if address is None:
            return None, False
        if address.count(":") == 1 or "]:" in address:
            entry = HostPort.parse("hosts", address)
            return (entry.host.text, entry.port), True
        return (address.strip("[]"), url.port), True

    def _headers(self, request: message.Request) -> list[tuple[str, str]]:
        pairs = [(str(k), v) for k, v in request.headers.items() if k.lower() not in _FRAMING]
        if self._guarded.policy.scrub:
            given = set(self._request.headers)
            self._secrets |= secrets_in([pair for pair in pairs if pair not in given])
            self._secrets |= secrets_in_query(request.url) - secrets_in_query(str(self._url))
        if self._secrets:
            pairs = [pair for pair in pairs if pair[0].lower() not in _UNREADABLE]
        return pairs

    def _count(self, size: int) -> None:
        if reason := self._guarded.meter.count(size):
            raise FetchFailed(_NOT_FOUND, reason)


async def _counted(guarded: Guarded, body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    async for piece in body:
        if reason := guarded.meter.count(len(piece)):
            raise FetchFailed(63, reason)
        yield piece


def _parsed(url: str) -> Url:
    try:
        return parse_url(url)
    except InvalidOption as error:
        raise FetchFailed(3, f"{error.message} ({url!r})") from None


def _head(status: int, headers: Mapping[str, str] | CIMultiDict[str]) -> Head:
    try:
        reason = HTTPStatus(status).phrase
    except ValueError:
        reason = ""
    pairs = [(str(name), value) for name, value in headers.items()]
    return Head(version="1.1", status=status, reason=reason, headers=pairs)


def _refusal(status: int, reason: str) -> _Answer:
    text = f"smokebox: {reason}\n"
    return _Answer(_head(status, {"content-type": "text/plain"}), message.Body(text))
