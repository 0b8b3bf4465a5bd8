"""The server between a program and its providers: it records them, or stands in for them."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

import aiohttp
from aiohttp import web

from smokebox.agents.providers import KNOWN, find_provider
from smokebox.client.bindings import load
from smokebox.testing.loopback import LoopbackServer
from smokebox.testing.recording.exchange import Exchange, Recording, difference, read, write

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
        self._models = load().models if models is None else models
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
        asked = Exchange(path=_path(request), body=_parsed(raw), status=0, pieces=[])
        known = next((one for one in self._kept.exchanges if one.key == asked.key), None)
        if known is None:
            return web.json_response({"error": {"message": self._missing(asked)}}, status=400)
        self._kept.exchanges.remove(known)
        return await _replay(request, known)

    def _missing(self, asked: Exchange) -> str:
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
            Exchange(
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


async def _replay(request: web.Request, known: Exchange) -> web.StreamResponse:
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
