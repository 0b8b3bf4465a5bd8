"""Handlers that run in a client, over the handler channel."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from smokebox.egress import Refused, Request, Response, bearer
from smokebox.egress.channel_streams import WINDOW
from smokebox.egress.handler import HandlerFailed
from smokebox.egress.handler_server import HandlerServer
from smokebox.egress.remote_handlers import RemoteHandlers
from smokebox.wire.handlers import (
    HandleFrame,
    Piece,
    SendFrame,
    ServeFrame,
    ServingFrame,
    from_client,
    from_server,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.egress import Handler, HandlerContext
    from smokebox.wire.frames import Frame

SECONDS = 20.0
BIG = 5 * WINDOW


class Channel:
    """A server and a client joined by two queues. `frames` has every frame sent."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        self.frames: list[Any] = []
        self.handlers = handlers
        self._to_client: asyncio.Queue[str | bytes] = asyncio.Queue()
        self._to_server: asyncio.Queue[str | bytes] = asyncio.Queue()
        self.remote = RemoteHandlers(self._sender(self._to_client), trusted=True)
        self.server = HandlerServer("box-1", handlers, "the env", self._sender(self._to_server))
        self.connected = True
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._run())]

    def _sender(self, queue: asyncio.Queue[str | bytes]) -> Any:
        async def send(frame: Frame | bytes) -> None:
            if not self.connected:
                raise ConnectionResetError
            data = frame if isinstance(frame, bytes) else msgspec.json.encode(frame).decode()
            queue.put_nowait(data)

        return send

    async def _serve(self) -> None:
        while True:
            frame = from_client(await self._to_server.get())
            self.frames.append(frame)
            await self.remote.receive(frame)

    async def _run(self) -> None:
        while True:
            frame = from_server(await self._to_client.get())
            self.frames.append(frame)
            if not isinstance(frame, ServingFrame):
                self.server.receive(frame)

    async def handle(self, request: Request, context: Any = None, slot: str = "a.test") -> Any:
        async with asyncio.timeout(SECONDS):
            return await self.remote.handle(slot, request, None, context or FakeContext())

    def frame_types(self) -> list[str]:
        return [type(frame).__name__ for frame in self.frames]

    async def aclose(self) -> None:
        self.connected = False
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self.server.aclose()
        await self.remote.aclose()


class FakeContext:
    """A `HandlerContext` that returns fixed responses to `forward`."""

    sandbox_id, rule = "box-1", "outbound_by_host['a.test']"

    def __init__(self, *responses: Response) -> None:
        self.responses = list(responses)
        self.forwarded: list[tuple[Request, str | None]] = []

    async def forward(
        self, request: Request, *, to: str | None = None, trusted: bool = True
    ) -> Response:
        self.forwarded.append((request, to))
        return self.responses.pop(0)


@contextlib.asynccontextmanager
async def connect(handler: Handler) -> AsyncIterator[Channel]:
    channel = Channel({"a.test": handler})
    try:
        yield channel
    finally:
        await channel.aclose()


class CountedBody:
    """A body that counts the bytes read from it."""

    def __init__(self, size: int, piece: int = 64 * 1024) -> None:
        self.read = 0
        self._size, self._piece = size, piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.read < self._size:
            size = min(self._piece, self._size - self.read)
            self.read += size
            yield b"x" * size
            await asyncio.sleep(0)


def make_request(body: Any = None, method: str = "POST") -> Request:
    return Request(method, "https://a.test/v1", {"x-one": "1"}, body)


async def wait_until(condition: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


async def test_edited_request_takes_one_round_trip_without_its_body() -> None:
    body = CountedBody(BIG)
    request = make_request(body)
    before = request.body
    async with connect(bearer("s3cret")) as channel:
        result = await channel.handle(request)
        assert channel.frame_types() == ["HandleFrame", "SendFrame"]
    assert result is request
    assert result.body is before
    assert result.body.unread
    assert body.read == 0
    assert result.headers["authorization"] == "Bearer s3cret"
    assert result.headers["x-one"] == "1"


async def test_handler_gets_request_env_and_context() -> None:
    seen: list[Any] = []

    async def inspect(request: Request, env: Any, context: HandlerContext) -> Request:
        seen.extend([request.method, request.url, env, context.sandbox_id, context.rule])
        return request

    async with connect(inspect) as channel:
        await channel.handle(make_request())
    assert seen == ["POST", "https://a.test/v1", "the env", "box-1", FakeContext.rule]


async def test_handler_may_respond_itself() -> None:
    async def respond(request: Request, env: Any, context: HandlerContext) -> Response:
        return Response("made here", 418, {"x-two": "2"})

    async with connect(respond) as channel:
        result = await channel.handle(make_request())
        assert channel.frame_types() == ["HandleFrame", "RespondFrame"]
    assert (result.status, result.headers["x-two"], await result.text()) == (418, "2", "made here")


async def test_body_that_is_read_is_sent_back_with_the_request() -> None:
    async def read(request: Request, env: Any, context: HandlerContext) -> Request:
        assert len(await request.read()) == BIG
        return request

    async with connect(read) as channel:
        result = await channel.handle(make_request(CountedBody(BIG)))
        assert len(await result.read()) == BIG
        await wait_until(lambda: not channel.remote._calls)


async def test_body_may_be_replaced_as_it_streams() -> None:
    async def uppercase(request: Request, env: Any, context: HandlerContext) -> Request:
        body = request.body

        async def upper() -> AsyncIterator[bytes]:
            async for piece in body:
                yield piece.upper()

        return Request(request.method, request.url, request.headers, upper())

    async with connect(uppercase) as channel:
        result = await channel.handle(make_request(CountedBody(BIG)))
        assert await result.read() == b"X" * BIG
        await wait_until(
            lambda: not channel.remote._calls and not channel.server._streams._outgoing
        )


async def test_unread_body_is_not_sent_beyond_the_window() -> None:
    async def respond_with_stream(request: Request, env: Any, context: HandlerContext) -> Response:
        return Response(CountedBody(100 * WINDOW))

    async with connect(respond_with_stream) as channel:
        result = await channel.handle(make_request())
        pieces = aiter(result.body)
        first = await anext(pieces)
        await wait_until(lambda: sum(isinstance(frame, Piece) for frame in channel.frames) > 4)
        for _ in range(200):
            await asyncio.sleep(0)
        sent = sum(len(frame.data) for frame in channel.frames if isinstance(frame, Piece))
        assert len(first) <= sent <= 2 * WINDOW + 256 * 1024
        await pieces.aclose()
        await wait_until(lambda: not channel.server._streams._outgoing)


async def test_forwarded_response_is_passed_on_without_its_body() -> None:
    async def relay(request: Request, env: Any, context: HandlerContext) -> Response:
        request.headers["x-three"] = "3"
        response = await context.forward(request, to="http://127.0.0.1:9")
        response.headers["x-seen"] = "yes"
        return response

    body = CountedBody(BIG)
    response = Response(body, 201, {"content-type": "text/plain"})
    context = FakeContext(response)
    async with connect(relay) as channel:
        result = await channel.handle(make_request(CountedBody(BIG)), context)
        assert channel.frame_types() == [
            "HandleFrame",
            "ForwardFrame",
            "ForwardedFrame",
            "RespondFrame",
        ]
    assert result.body is response.body
    assert (result.status, result.headers["x-seen"], body.read) == (201, "yes", 0)
    ((request, to),) = context.forwarded
    assert (request.headers["x-three"], to) == ("3", "http://127.0.0.1:9")
    assert request.body.unread


async def test_forwarded_response_may_be_read_and_edited() -> None:
    async def edit(request: Request, env: Any, context: HandlerContext) -> Response:
        first = await context.forward(request)
        second = await context.forward(Request("GET", "https://a.test/again"))
        return Response(await first.read() + await second.read())

    context = FakeContext(Response(CountedBody(BIG)), Response("the end"))
    async with connect(edit) as channel:
        result = await channel.handle(make_request(), context)
        assert await result.read() == b"x" * BIG + b"the end"


async def test_refusal_keeps_its_reason() -> None:
    async def refuse(request: Request, env: Any, context: HandlerContext) -> Request:
        raise Refused("not on a monday")

    async with connect(refuse) as channel:
        with pytest.raises(Refused, match="not on a monday"):
            await channel.handle(make_request())


@pytest.mark.parametrize("failure", ["error", "nothing", "partly read"])
async def test_failed_handler_sends_its_class_and_no_secret(
    failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(request: Request, env: Any, context: HandlerContext) -> Any:
        if failure == "error":
            raise KeyError("s3cret")
        if failure == "nothing":
            return None
        await anext(aiter(request.body))
        return request

    async with connect(fail) as channel:
        with pytest.raises(HandlerFailed) as caught:
            await channel.handle(make_request(CountedBody(BIG)))
    kind = {"error": "KeyError", "nothing": "TypeError", "partly read": "ValueError"}[failure]
    assert caught.value.kind == kind
    assert "s3cret" not in str(caught.value)
    assert "failed" in caplog.text


async def test_body_that_breaks_off_raises_in_its_reader() -> None:
    async def break_off(request: Request, env: Any, context: HandlerContext) -> Response:
        async def body() -> AsyncIterator[bytes]:
            yield b"started"
            raise RuntimeError("s3cret")

        return Response(body())

    async with connect(break_off) as channel:
        result = await channel.handle(make_request())
        with pytest.raises(ConnectionError, match="broke off with RuntimeError"):
            await result.read()


async def test_failed_forward_raises_in_the_handler() -> None:
    class Broken(FakeContext):
        async def forward(
            self, request: Request, *, to: str | None = None, trusted: bool = True
        ) -> Response:
            raise OSError("no such host")

    async def relay(request: Request, env: Any, context: HandlerContext) -> Response:
        try:
            return await context.forward(request)
        except ConnectionError as error:
            return Response(str(error), 599)

    async with connect(relay) as channel:
        result = await channel.handle(make_request(), Broken())
        assert (result.status, await result.text()) == (599, "no such host")


async def test_requests_are_handled_concurrently() -> None:
    release, waiting = asyncio.Event(), 0

    async def wait(request: Request, env: Any, context: HandlerContext) -> Request:
        nonlocal waiting
        waiting += 1
        await release.wait()
        return request

    async with connect(wait) as channel, asyncio.TaskGroup() as group:
        tasks = [group.create_task(channel.handle(make_request())) for _ in range(50)]
        await wait_until(lambda: waiting == 50)
        release.set()
        assert len([await task for task in tasks]) == 50


async def test_cancelled_caller_cancels_the_handler() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(request: Request, env: Any, context: HandlerContext) -> Request:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return request

    async with connect(hang) as channel:
        task = asyncio.create_task(channel.handle(make_request(CountedBody(BIG))))
        await started.wait()
        task.cancel()
        await asyncio.wait([task])
        async with asyncio.timeout(SECONDS):
            await cancelled.wait()
        assert not channel.remote._calls


async def test_disconnected_client_refuses_requests() -> None:
    started = asyncio.Event()

    async def hang(request: Request, env: Any, context: HandlerContext) -> Request:
        started.set()
        await asyncio.Event().wait()
        return request

    async with connect(hang) as channel:
        task = asyncio.create_task(channel.handle(make_request()))
        await started.wait()
        await channel.remote.aclose()
        with pytest.raises(Refused, match="disconnected"):
            await task
        with pytest.raises(Refused, match="disconnected"):
            await channel.handle(make_request())


async def test_removed_handler_refuses_requests() -> None:
    async with connect(bearer("s3cret")) as channel:
        channel.handlers.clear()
        with pytest.raises(Refused, match="has removed the handler"):
            await channel.handle(make_request())


async def test_serve_frame_sets_the_slots_and_is_confirmed() -> None:
    async with connect(bearer("s3cret")) as channel:
        await channel.remote.receive(ServeFrame(number=7, slots=["a.test", ""]))
        assert set(channel.remote.slots) == {"a.test", ""}
        await wait_until(lambda: channel.frames)
        assert channel.frames == [ServingFrame(number=7)]


async def test_frames_of_unknown_requests_are_ignored() -> None:
    async with connect(bearer("s3cret")) as channel:
        send = SendFrame(id=99, method="GET", url="x", headers=[], content=msgspec.UNSET)  # type: ignore[arg-type]
        await channel.remote.receive(send)
        await channel.remote.receive(Piece(99, 1, b"data"))
        assert (await channel.handle(make_request())).headers["authorization"]


@pytest.mark.parametrize("frame", [b"", b"1234567", "{}", "[]", '{"type": "handle"}', "x"])
def test_invalid_frames_raise_value_error(frame: str | bytes) -> None:
    with pytest.raises(ValueError):
        from_client(frame)
    with pytest.raises(ValueError):
        from_server(frame)


def test_frames_survive_encoding() -> None:
    frame = HandleFrame(
        id=1, slot="", rule="outbound", method="GET", url="u", headers=[("a", "b")], body=True
    )
    assert from_server(msgspec.json.encode(frame).decode()) == frame
    piece = Piece(1, 2, b"data")
    assert from_client(piece.pack()) == from_server(piece.pack()) == piece
