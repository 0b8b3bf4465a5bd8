"""Answers of the real network, recorded once and replayed in tests.

A file has one line of JSON for each exchange. No header of a request is in it, and what was
in one that may be secret is struck from all that is.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from smokebox.egress.builtin_handlers import BuiltinHandler
from smokebox.egress.handler import Handler, HandlerContext, Refused
from smokebox.egress.message import Request, Response
from smokebox.errors import InvalidOption

REDACTED = "[redacted]"

_SECRET_NAME = re.compile(r"auth|cookie|key|password|secret|signature|token|credential", re.I)
_SHORTEST = 6
# They tell of this one connection, and not of the answer.
_PASSING = frozenset(
    ("connection", "content-length", "date", "keep-alive", "set-cookie", "transfer-encoding")
)


class RecordedExchange(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request and its answer, as a line has it. `request` is the hash of its body."""

    method: str
    url: str
    status: int
    request: str = ""
    headers: list[tuple[str, str]] = []
    text: str | None = None
    base64: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What a request must have to get this answer."""
        return self.method, self.url, self.request

    def response(self) -> Response:
        """The answer."""
        body = base64.b64decode(self.base64) if self.base64 is not None else self.text or ""
        response = Response(body, self.status)
        response.headers.extend(self.headers)
        return response


def record(path: str | os.PathLike[str]) -> Handler:
    """Send each request, and add it with its answer to a file, for `replay`.

    The last of a chain: `chain(bearer(env.TOKEN), record("github.jsonl"))`.
    """
    return _Record(_file("record()", path))


def replay(path: str | os.PathLike[str]) -> Handler:
    """Answer from a file of `record`; what is not in it is refused, and nothing is sent.

    What was asked several times is answered in that order, and then by the last.
    """
    return _Replay(_file("replay()", path))


class _Record(BuiltinHandler):
    ends = True

    def __init__(self, path: Path) -> None:
        super().__init__("record")
        self._path = path
        self._lock = threading.Lock()

    async def __call__(self, request: Request, env: Any, context: HandlerContext) -> Response:
        method, url, digest = await _key(request)
        strike = _Strike(request)
        response = await context.forward(request)
        body = strike.bytes(await response.read())
        exchange = RecordedExchange(
            method=method,
            url=strike.text(url),
            request=digest,
            status=response.status,
            headers=[
                (str(name), REDACTED if _SECRET_NAME.search(name) else strike.text(value))
                for name, value in response.headers.items()
                if name.lower() not in _PASSING
            ],
        )
        try:
            exchange.text = body.decode()
        except UnicodeDecodeError:
            exchange.base64 = base64.b64encode(body).decode()
        await asyncio.to_thread(self._append, msgspec.json.encode(exchange) + b"\n")
        return response

    def _append(self, line: bytes) -> None:
        with self._lock, open(self._path, "ab") as file:
            file.write(line)


class _Replay(BuiltinHandler):
    ends = True

    def __init__(self, path: Path) -> None:
        super().__init__("replay")
        self._path = path
        self._answers = _load(path)

    async def __call__(self, request: Request, env: Any, context: HandlerContext) -> Response:
        found = self._answers.get(await _key(request))
        if not found:
            raise Refused(f"{request.method} {_shown(request.url)} is not in {self._path.name}")
        return (found.pop(0) if len(found) > 1 else found[0]).response()


class _Strike:
    """Takes the secrets of one request out of what is kept of its answer."""

    def __init__(self, request: Request) -> None:
        values = set()
        for name, value in request.headers.items():
            if _SECRET_NAME.search(name):
                values |= {value, value.partition(" ")[2].strip()}
        words = sorted((one for one in values if len(one) >= _SHORTEST), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, words)).encode()) if words else None

    def bytes(self, data: bytes) -> bytes:
        return data if self._pattern is None else self._pattern.sub(REDACTED.encode(), data)

    def text(self, text: str) -> str:
        return self.bytes(text.encode("utf-8", "surrogateescape")).decode("utf-8", "replace")


async def _key(request: Request) -> tuple[str, str, str]:
    body = await request.read()
    return request.method, _shown(request.url), hashlib.sha256(body).hexdigest() if body else ""


def _shown(url: str) -> str:
    """A URL without what opens something: user and password, and secrets of the query."""
    parts = urlsplit(url)
    pairs = []
    for pair in parts.query.split("&"):
        name, equals, _ = pair.partition("=")
        pairs.append(f"{name}={REDACTED}" if equals and _SECRET_NAME.search(name) else pair)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host, query="&".join(pairs), fragment=""))


def _load(path: Path) -> dict[tuple[str, str, str], list[RecordedExchange]]:
    found: dict[tuple[str, str, str], list[RecordedExchange]] = defaultdict(list)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidOption(
            f"replay(): {path} cannot be read: {error.strerror}.",
            hint="Record it first, with record() in its place.",
            option="path",
            value=str(path),
        ) from error
    for number, line in enumerate(lines, 1):
        try:
            exchange = msgspec.json.decode(line, type=RecordedExchange)
        except msgspec.MsgspecError as error:
            raise InvalidOption(
                f"replay(): {path}, line {number}: {error}.",
                hint="Record it again.",
                option="path",
                value=str(path),
            ) from error
        found[exchange.key].append(exchange)
    return dict(found)


def _file(where: str, path: str | os.PathLike[str]) -> Path:
    if isinstance(path, (str, os.PathLike)) and os.fspath(path) and Path(path).parent.is_dir():
        return Path(path)
    raise InvalidOption(
        f"{where}: {path!r} is no file in a directory that is there.",
        hint="Pass the path of a file, such as 'tests/github.jsonl'.",
        option="path",
        value=str(path),
    )
