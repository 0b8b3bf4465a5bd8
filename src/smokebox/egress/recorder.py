"""Responses of the real network, recorded once and replayed in tests.

A file has one line of JSON for each request with its response. Headers of requests are left out,
and their secrets are redacted in everything else.
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
from smokebox.egress.scrub import REDACTED, Scrubber, secrets_in
from smokebox.errors import InvalidOption

_SECRET_NAME = re.compile(r"auth|cookie|key|password|secret|signature|token|credential", re.I)
_REDACTED = REDACTED.decode()
# Headers of the connection or the moment.
_NOT_RECORDED = frozenset(
    ("connection", "content-length", "date", "keep-alive", "set-cookie", "transfer-encoding")
)


class RecordedResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of a file: a request with its response. `request` is the hash of its body."""

    method: str
    url: str
    status: int
    request: str = ""
    headers: list[tuple[str, str]] = []
    text: str | None = None
    base64: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Identifies the request."""
        return self.method, self.url, self.request

    def response(self) -> Response:
        """Return the response."""
        body = base64.b64decode(self.base64) if self.base64 is not None else self.text or ""
        response = Response(body, self.status)
        response.headers.extend(self.headers)
        return response


def record(path: str | os.PathLike[str]) -> Handler:
    """Send each request, and append it with its response to a file, for `replay`.

    Use it last in a chain: `chain(bearer(env.TOKEN), record("github.jsonl"))`.
    """
    return _Record(_file("record()", path))


def replay(path: str | os.PathLike[str]) -> Handler:
    """Respond from a file of `record`, and refuse requests that are not in it.

    Responses to repeated requests come in the order of their recording, and then the last again.
    """
    return _Replay(_file("replay()", path))


class _Record(BuiltinHandler):
    responds = True

    def __init__(self, path: Path) -> None:
        super().__init__("record")
        self._path = path
        self._lock = threading.Lock()

    async def __call__(self, request: Request, env: Any, context: HandlerContext) -> Response:
        method, url, digest = await _key(request)
        headers = [field for field in request.headers.items() if _SECRET_NAME.search(field[0])]
        scrubber = Scrubber(secrets_in(headers))
        response = await context.forward(request)
        body = scrubber.feed(await response.read()) + scrubber.finish()
        recorded = RecordedResponse(
            method=method,
            url=scrubber.text(url),
            request=digest,
            status=response.status,
            headers=[
                (str(name), _REDACTED if _SECRET_NAME.search(name) else scrubber.text(value))
                for name, value in response.headers.items()
                if name.lower() not in _NOT_RECORDED
            ],
        )
        try:
            recorded.text = body.decode()
        except UnicodeDecodeError:
            recorded.base64 = base64.b64encode(body).decode()
        await asyncio.to_thread(self._append, msgspec.json.encode(recorded) + b"\n")
        return response

    def _append(self, line: bytes) -> None:
        with self._lock, open(self._path, "ab") as file:
            file.write(line)


class _Replay(BuiltinHandler):
    responds = True

    def __init__(self, path: Path) -> None:
        super().__init__("replay")
        self._path = path
        self._responses = _load(path)

    async def __call__(self, request: Request, env: Any, context: HandlerContext) -> Response:
        found = self._responses.get(await _key(request))
        if not found:
            raise Refused(
                f"{request.method} {_redact_url(request.url)} is not in {self._path.name}"
            )
        return (found.pop(0) if len(found) > 1 else found[0]).response()


async def _key(request: Request) -> tuple[str, str, str]:
    body = await request.read()
    return (
        request.method,
        _redact_url(request.url),
        hashlib.sha256(body).hexdigest() if body else "",
    )


def _redact_url(url: str) -> str:
    """Return a URL without user and password, and without secrets in its query."""
    parts = urlsplit(url)
    pairs = []
    for pair in parts.query.split("&"):
        name, equals, _ = pair.partition("=")
        pairs.append(f"{name}={_REDACTED}" if equals and _SECRET_NAME.search(name) else pair)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host, query="&".join(pairs), fragment=""))


def _load(path: Path) -> dict[tuple[str, str, str], list[RecordedResponse]]:
    found: dict[tuple[str, str, str], list[RecordedResponse]] = defaultdict(list)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidOption(
            f"replay(): {path} cannot be read: {error.strerror}.",
            hint="Record it first: use record() instead.",
            option="path",
            value=str(path),
        ) from error
    for number, line in enumerate(lines, 1):
        try:
            recorded = msgspec.json.decode(line, type=RecordedResponse)
        except msgspec.MsgspecError as error:
            raise InvalidOption(
                f"replay(): {path}, line {number}: {error}.",
                hint="Record it again.",
                option="path",
                value=str(path),
            ) from error
        found[recorded.key].append(recorded)
    return dict(found)


def _file(where: str, path: str | os.PathLike[str]) -> Path:
    if isinstance(path, (str, os.PathLike)) and os.fspath(path) and Path(path).parent.is_dir():
        return Path(path)
    raise InvalidOption(
        f"{where}: {path!r} is not a file in an existing directory.",
        hint="Pass the path of a file, such as 'tests/github.jsonl'.",
        option="path",
        value=str(path),
    )
