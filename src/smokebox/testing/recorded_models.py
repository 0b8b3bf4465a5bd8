"""`RecordedModels`: a proxy that records the responses of model providers, and replays them."""

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

from starlette.responses import JSONResponse

from smokebox.agents.providers import KNOWN, find_provider
from smokebox.errors import InvalidOption, MissingDependency, NotFound
from smokebox.project import load_config
from smokebox.testing.loopback import ChunkedResponse, CutConnection, LoopbackServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from types import TracebackType

    import httpx2
    from starlette.requests import Request
    from starlette.types import ASGIApp

VARIABLE = "SMOKEBOX_RECORD"
VERSION = 1
# Default base URLs of the SDKs.
_BASE_URLS = {
    "anthropic": "https://api.anthropic.com",
    "openai": "https://api.openai.com/v1",
    "google": "https://generativelanguage.googleapis.com",
}
# A response may be silent for as long as a model thinks.
_READ_SECONDS = 600.0
_CONNECT_SECONDS = 30.0
_RECORDED_HEADERS = ("content-type", "retry-after")
_DROPPED_HEADERS = ("host", "content-length", "accept-encoding", "connection", "transfer-encoding")
# Fields with ids that a provider chooses at random.
_ID_FIELDS = ("id", "call_id", "tool_use_id", "tool_call_id", "item_id")
_MAX_DIFF_LINES = 12


class RecordedModels(LoopbackServer):
    """Responses of real providers, replayed from a file.

        async with RecordedModels("tests/recorded/review.jsonl") as recorded:
            model = open_model("anthropic/claude-sonnet-4-6", recorded.config)

    While recording, requests are forwarded to the providers, and the file is written when the
    block ends without an error. Otherwise no request leaves the machine and no API key is
    needed: a recorded request gets its recorded response, and any other is rejected with the
    lines that differ. Recordings contain no keys. `with` instead of `async with` runs the
    server on a background thread.

    Args:
        file: The recording.
        record: Record instead of replaying, by default if SMOKEBOX_RECORD is set.
        models: The `[models]` table, by default that of smokebox.toml.

    Raises:
        NotFound: The recording to replay does not exist.
        InvalidOption: It is not a recording.
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
        self._recording = Recording() if self.recording else read(self.file)
        self._client: httpx2.AsyncClient | None = None

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """Configuration for `open_model` that directs requests to this server."""
        return {name: self._provider(name) for name in {*KNOWN, *self._models, *self._apis}}

    @property
    def remaining(self) -> int:
        """Number of recorded requests that have not been repeated; 0 while recording."""
        return 0 if self.recording else len(self._recording.requests)

    @property
    def _apis(self) -> dict[str, str]:
        return self._recording.apis

    def _provider(self, name: str) -> dict[str, Any]:
        api = self._apis.get(name) or find_provider(name, self._models).api
        target = {"base_url": f"{self._origin}/{name}", "api": api}
        key = {} if self.recording else {"api_key": "none"}
        return {**self._models.get(name, {}), **target, **key}

    async def start(self, port: int = 0) -> None:
        """Listen on a port, by default any free one."""
        if self.recording:
            self._client = _open_client()
        await super().start(port)

    async def stop(self) -> None:
        """Close the socket and all connections."""
        await super().stop()
        if self._client is not None:
            await self._client.aclose()

    async def respond(self, request: Request) -> ASGIApp:
        """Return the response to a request, recorded or from the provider."""
        body = await request.body()
        if self._client is not None:
            return await self._forward(self._client, request, body)
        key = _key(_path(request), _parse(body))
        found = next((one for one in self._recording.requests if one.key == key), None)
        if found is None:
            return JSONResponse({"error": {"message": self._mismatch(key)}}, 400)
        self._recording.requests.remove(found)
        return ChunkedResponse(_replay(found), found.status, found.headers)

    def _mismatch(self, key: str) -> str:
        hint = f"Record it again with {VARIABLE}=1."
        if not self._recording.requests:
            return f"{self.file} has no further request. {hint}"
        diff = difference(key, self._recording.requests[0].key)
        return f"{self.file} does not have this request. The next in it differs:\n{diff}\n{hint}"

    async def _forward(
        self, client: httpx2.AsyncClient, request: Request, body: bytes
    ) -> ChunkedResponse:
        name, _, path = request.scope["path"].removeprefix("/").partition("/")
        provider = find_provider(name, self._models)
        url = f"{(provider.base_url or _BASE_URLS[provider.name]).rstrip('/')}/{path}"
        query = request.scope["query_string"].decode()
        headers = {
            name: value for name, value in request.headers.items() if name not in _DROPPED_HEADERS
        }
        upstream = client.build_request(
            request.method,
            f"{url}?{query}" if query else url,
            content=body,
            headers=headers | {"accept-encoding": "identity"},
        )
        response = await client.send(upstream, stream=True)
        recorded = RecordedModelRequest(
            path=_path(request),
            body=_parse(body),
            status=response.status_code,
            headers={
                name: response.headers[name]
                for name in _RECORDED_HEADERS
                if name in response.headers
            },
        )
        self._apis[provider.name] = provider.api
        self._recording.requests.append(recorded)
        return ChunkedResponse(_record(response, recorded), recorded.status, recorded.headers)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()
        if self.recording and error is None:
            await asyncio.to_thread(write, self.file, self._recording)


def _open_client() -> httpx2.AsyncClient:
    try:
        import httpx2
    except ImportError as error:
        raise MissingDependency(
            "recording models needs httpx2, which cannot be imported.",
            hint="Install it: pip install 'smokebox[models]'.",
            package="httpx2",
            extra="models",
        ) from error
    return httpx2.AsyncClient(timeout=httpx2.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS))


async def _record(
    response: httpx2.Response, recorded: RecordedModelRequest
) -> AsyncIterator[bytes]:
    """Yield the body of a response, and record it in the end."""
    import httpx2

    body = b""
    try:
        async for chunk in response.aiter_raw():
            body += chunk
            yield chunk
    except httpx2.HTTPError:
        recorded.complete = False
        raise CutConnection from None
    finally:
        recorded.chunks = _split_events(body)
        await response.aclose()


async def _replay(recorded: RecordedModelRequest) -> AsyncIterator[bytes]:
    for chunk in recorded.chunks:
        yield chunk.encode(errors="surrogateescape")
    if not recorded.complete:
        raise CutConnection


def _path(request: Request) -> str:
    """Return the path and the query, without the API key that some providers put there."""
    pairs = parse_qsl(request.scope["query_string"].decode())
    query = urlencode([pair for pair in pairs if pair[0] != "key"])
    path = str(request.scope["path"])
    return f"{path}?{query}" if query else path


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="surrogateescape")


def _split_events(body: bytes) -> list[str]:
    """Split a body into its events, however the network divided it."""
    text = body.decode(errors="surrogateescape")
    return [event for event in re.split(r"(?<=\n\n)", text) if event]


@dataclass(slots=True, kw_only=True)
class RecordedModelRequest:
    """A request and its response in chunks; `complete` is False if the connection was lost.

    Headers of the request are not recorded, because they contain the API key.
    """

    path: str
    body: Any
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[str] = field(default_factory=list)
    complete: bool = True

    @property
    def key(self) -> str:
        """Text that is equal for equivalent requests."""
        return _key(self.path, self.body)


@dataclass(slots=True)
class Recording:
    """Content of a recording: requests, and the API of each provider."""

    apis: dict[str, str] = field(default_factory=dict)
    requests: list[RecordedModelRequest] = field(default_factory=list)


def _key(path: str, body: object) -> str:
    return f"{path} {json.dumps(_number_ids(body, {}), sort_keys=True, indent=1)}"


def _number_ids(value: object, known: dict[str, str]) -> object:
    """Replace ids by their order of appearance."""
    if isinstance(value, list):
        return [_number_ids(item, known) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: known.setdefault(item, f"#{len(known) + 1}")
        if name in _ID_FIELDS and isinstance(item, str)
        else _number_ids(item, known)
        for name, item in value.items()
    }


def difference(actual: str, recorded: str) -> str:
    """Return the first lines of the diff between two requests."""
    lines = difflib.unified_diff(recorded.splitlines(), actual.splitlines(), lineterm="", n=0)
    diff = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    more = len(diff) - _MAX_DIFF_LINES
    return "\n".join(diff[:_MAX_DIFF_LINES] + ([f"and {more} more lines"] if more > 0 else []))


def read(file: Path) -> Recording:
    """Read a recording.

    Raises:
        NotFound: The file does not exist.
        InvalidOption: It is not a recording, or of another version.
    """
    try:
        first, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        version = first["version"]
        if version == VERSION:
            return Recording(first["apis"], [RecordedModelRequest(**line) for line in lines])
    except FileNotFoundError:
        raise NotFound(
            f"there is no recording {os.fspath(file)!r}.",
            hint=f"Run once with {VARIABLE}=1 and the API key of the provider.",
            kind="recording",
            name=os.fspath(file),
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise _invalid(file, "is not a recording of models") from error
    raise _invalid(file, f"has version {version}; this Smokebox reads version {VERSION}")


def write(file: Path, recording: Recording) -> None:
    """Write a recording atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"version": VERSION, "apis": recording.apis}, *map(asdict, recording.requests)]
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    partial.replace(file)


def _invalid(file: Path, reason: str) -> InvalidOption:
    return InvalidOption(
        f"{os.fspath(file)!r} {reason}.",
        hint=f"Record it again with {VARIABLE}=1.",
        option="file",
        value=os.fspath(file),
    )
