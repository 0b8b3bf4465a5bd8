"""The server between a program and its providers: it records them, or stands in for them."""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

import aiohttp
from aiohttp import web

from smokebox.agents.providers import KNOWN, find_provider
from smokebox.errors import InvalidOption, NotFound
from smokebox.project import load_config
from smokebox.testing.loopback import LoopbackServer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

VARIABLE = "SMOKEBOX_RECORD"
# Where the SDKs go by themselves.
_HOMES = {
    "anthropic": "https://api.anthropic.com",
    "openai": "https://api.openai.com/v1",
    "google": "https://generativelanguage.googleapis.com",
}
# An answer may be silent for as long as a model thinks.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=600)
_OF_THE_ANSWER = ("content-type", "retry-after")
_NOT_PASSED_ON = ("host", "content-length", "accept-encoding", "connection", "transfer-encoding")


class RecordedModels(LoopbackServer):
    """What real providers answered, from a file.

        async with RecordedModels("tests/recorded/review.jsonl") as recorded:
            model = open_model("anthropic/claude-sonnet-4-6", recorded.config)

    With `record`, or with SMOKEBOX_RECORD=1 in the environment, requests go to the providers,
    and the file is made when the block ends without an error. Without, no request leaves the
    machine and no key is needed: each is answered as the same request was, and one that was
    not recorded is refused with what is different. Keys are in no recording.

    `models` is the `[models]` table of smokebox.toml, which is read where none is given.
    `with` instead of `async with` runs it on a thread of its own.
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        *,
        record: bool | None = None,
        models: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.file = Path(file)
        self.recording = bool(os.environ.get(VARIABLE)) if record is None else record
        self._models = load_config().models if models is None else models
        self._kept = Recording() if self.recording else read(self.file)
        self._session: aiohttp.ClientSession | None = None

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """What `open_model` takes, so that requests to the providers come here."""
        return {name: self._here(name) for name in {*KNOWN, *self._models, *self._kept.apis}}

    @property
    def remaining(self) -> int:
        """How many of the recorded requests were not made yet; while recording, 0."""
        return 0 if self.recording else len(self._kept.exchanges)

    def _here(self, name: str) -> dict[str, Any]:
        api = self._kept.apis.get(name) or find_provider(name, self._models).api
        here = {"base_url": f"{self._origin}/{name}", "api": api}
        key = {} if self.recording else {"api_key": "none"}
        return {**self._models.get(name, {}), **here, **key}

    def routes(self, router: web.UrlDispatcher) -> None:
        """Every path below the name of a provider."""
        router.add_route("*", "/{provider}/{path:.*}", self._answer)

    async def start(self, port: int = 0) -> None:
        """Listen, on a free port unless one is given."""
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        await super().start(port)

    async def stop(self) -> None:
        """Listen no more."""
        if self._session is not None:
            await self._session.close()
        await super().stop()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if self.recording:
            return await self._pass_on(request, raw)
        asked = RecordedExchange(path=_path(request), body=_parsed(raw), status=0, pieces=[])
        known = next((one for one in self._kept.exchanges if one.key == asked.key), None)
        if known is None:
            return web.json_response({"error": {"message": self._missing(asked)}}, status=400)
        self._kept.exchanges.remove(known)
        return await _replay(request, known)

    def _missing(self, asked: RecordedExchange) -> str:
        again = f"Record it again with {VARIABLE}=1."
        if not self._kept.exchanges:
            return f"{self.file} has no further request. {again}"
        told = difference(asked.key, self._kept.exchanges[0].key)
        return f"{self.file} does not have this request. The next in it differs:\n{told}\n{again}"

    async def _pass_on(self, request: web.Request, raw: bytes) -> web.StreamResponse:
        assert self._session is not None
        provider = find_provider(request.match_info["provider"], self._models)
        home = (provider.base_url or _HOMES[provider.name]).rstrip("/")
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in _NOT_PASSED_ON
        }
        url = f"{home}/{request.match_info['path']}"
        query = f"?{request.query_string}" if request.query_string else ""
        async with self._session.request(
            request.method, url + query, data=raw, headers=headers | {"accept-encoding": "identity"}
        ) as answer:
            kept = {name: answer.headers[name] for name in _OF_THE_ANSWER if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            pieces: list[bytes] = []
            whole = True
            try:
                async for piece in answer.content.iter_any():
                    pieces.append(piece)
                    await response.write(piece)
            except (aiohttp.ClientError, TimeoutError):
                whole = False
        self._kept.apis[provider.name] = provider.api
        self._kept.exchanges.append(
            RecordedExchange(
                path=_path(request),
                body=_parsed(raw),
                status=answer.status,
                headers=kept,
                pieces=_settled(pieces),
                whole=whole,
            )
        )
        if not whole:
            _abort(request)
        return response

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()
        if self.recording and error is None:
            await asyncio.to_thread(write, self.file, self._kept)


async def _replay(request: web.Request, known: RecordedExchange) -> web.StreamResponse:
    response = web.StreamResponse(status=known.status, headers=known.headers)
    await response.prepare(request)
    for piece in known.pieces:
        await response.write(piece.encode(errors="surrogateescape"))
    if not known.whole:
        _abort(request)
    return response


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _path(request: web.Request) -> str:
    """The path with its query, but for a key that some put there."""
    query = urlencode([item for item in parse_qsl(request.query_string) if item[0] != "key"])
    return request.path + (f"?{query}" if query else "")


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="surrogateescape")


def _settled(pieces: list[bytes]) -> list[str]:
    """The answer in the pieces of its format, not in those that the network made of it."""
    text = b"".join(pieces).decode(errors="surrogateescape")
    return [piece for piece in re.split(r"(?<=\n\n)", text) if piece]


VERSION = 1
# Providers give what they call an id of their own each time; what counts is which is which.
_IDS = ("id", "call_id", "tool_use_id", "tool_call_id", "item_id")
_MOST_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedExchange:
    """A request and its answer, in the pieces that it came in.

    No header of the request is kept, so that no key is. `whole` is whether the answer came to
    its end.
    """

    path: str
    body: Any
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[str]
    whole: bool = True

    @property
    def key(self) -> str:
        """The same for requests that ask for the same."""
        return f"{self.path} {canonical(self.body)}"


@dataclass(slots=True)
class Recording:
    """What is in a file: exchanges, and how the providers of them are spoken to."""

    apis: dict[str, str] = field(default_factory=dict)
    exchanges: list[RecordedExchange] = field(default_factory=list)


def canonical(body: object) -> str:
    """A body as text, in which ids are numbered in the order in which they come."""
    return json.dumps(_numbered(body, {}), sort_keys=True, indent=1)


def _numbered(value: object, known: dict[str, str]) -> object:
    if isinstance(value, list):
        return [_numbered(item, known) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: known.setdefault(item, f"#{len(known) + 1}")
        if name in _IDS and isinstance(item, str)
        else _numbered(item, known)
        for name, item in value.items()
    }


def difference(wanted: str, had: str) -> str:
    """Where two requests differ, in a few lines."""
    lines = difflib.unified_diff(had.splitlines(), wanted.splitlines(), lineterm="", n=0)
    told = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    more = [f"and {len(told) - _MOST_LINES} lines more"] if len(told) > _MOST_LINES else []
    return "\n".join([*told[:_MOST_LINES], *more])


def read(file: Path) -> Recording:
    """What a file has. Raises `NotFound` and `InvalidOption`."""
    try:
        first, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        version = first["version"]
        if version == VERSION:
            return Recording(first["apis"], [RecordedExchange(**line) for line in lines])
    except FileNotFoundError:
        raise NotFound(
            f"there is no recording {os.fspath(file)!r}.",
            hint="Run once with SMOKEBOX_RECORD=1, and with the key of the provider.",
            kind="recording",
            name=os.fspath(file),
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise _unreadable(file, "is no recording of models") from error
    raise _unreadable(file, f"is of version {version}, and this Smokebox reads {VERSION}")


def write(file: Path, recording: Recording) -> None:
    """Keep it, all or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    first = {"version": VERSION, "apis": recording.apis}
    lines = [first, *map(asdict, recording.exchanges)]
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    beside.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    beside.replace(file)


def _unreadable(file: Path, why: str) -> InvalidOption:
    return InvalidOption(
        f"{os.fspath(file)!r} {why}.",
        hint="Make it again with SMOKEBOX_RECORD=1.",
        option="file",
        value=os.fspath(file),
    )
