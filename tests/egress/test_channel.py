"""Handlers of a client that are asked over a channel: one round trip, bodies only if read."""

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


class Pair:
    """A server and a client whose channel is two queues; `said` is all that went over it."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        self.said: list[Any] = []
        self.handlers = handlers
        self._to_client: asyncio.Queue[str | bytes] = asyncio.Queue()
        self._to_server: asyncio.Queue[str | bytes] = asyncio.Queue()
        self.remote = RemoteHandlers(self._sender(self._to_client))
        self.serving = HandlerServer("box-1", handlers, "the env", self._sender(self._to_server))
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
            self.said.append(frame)
            await self.remote.hear(frame)

    async def _run(self) -> None:
        while True:
            frame = from_server(await self._to_client.get())
            self.said.append(frame)
            if not isinstance(frame, ServingFrame):
                self.serving.hear(frame)

    async def ask(self, request: Request, context: Any = None, slot: str = "a.test") -> Any:
        async with asyncio.timeout(SECONDS):
            return await self.remote.handle(slot, request, None, context or Upstream())

    def kinds(self) -> list[str]:
        return [type(frame).__name__ for frame in self.said]

    async def aclose(self) -> None:
        self.connected = False
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self.serving.aclose()
        await self.remote.aclose()


class Upstream:
    """The context of the server: it answers what is forwarded by itself."""

    sandbox_id, rule = "box-1", "outbound_by_host['a.test']"

    def __init__(self, *answers: Response) -> None:
        self.answers = list(answers)
        self.forwarded: list[tuple[Request, str | None]] = []

    async def forward(self, request: Request, *, to: str | None = None) -> Response:
        self.forwarded.append((request, to))
        return self.answers.pop(0)


@contextlib.asynccontextmanager
async def pair(handler: Handler) -> AsyncIterator[Pair]:
    made = Pair({"a.test": handler})
    try:
        yield made
    finally:
        await made.aclose()


class Pieces:
    """A body that counts how much of it was read."""

    def __init__(self, size: int, piece: int = 64 * 1024) -> None:
        self.read = 0
        self._size, self._piece = size, piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.read < self._size:
            size = min(self._piece, self._size - self.read)
            self.read += size
            yield b"x" * size
            await asyncio.sleep(0)


def asking(body: Any = None, method: str = "POST") -> Request:
    return Request(method, "https://a.test/v1", {"x-one": "1"}, body)


async def until(condition: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


async def test_an_edited_request_costs_one_round_trip_and_no_body_is_sent() -> None:
    body = Pieces(BIG)
    request = asking(body)
    before = request.body
    async with pair(bearer("s3cret")) as both:
        made = await both.ask(request)
        assert both.kinds() == ["HandleFrame", "SendFrame"]
    assert made is request
    assert made.body is before
    assert made.body.untouched
    assert body.read == 0
    assert made.headers["authorization"] == "Bearer s3cret"
    assert made.headers["x-one"] == "1"


async def test_the_handler_gets_request_env_and_context() -> None:
    seen: list[Any] = []

    async def look(request: Request, env: Any, context: HandlerContext) -> Request:
        seen.extend([request.method, request.url, env, context.sandbox_id, context.rule])
        return request

    async with pair(look) as both:
        await both.ask(asking())
    assert seen == ["POST", "https://a.test/v1", "the env", "box-1", Upstream.rule]


async def test_a_handler_may_answer_by_itself() -> None:
    async def answer(request: Request, env: Any, context: HandlerContext) -> Response:
        return Response("made here", 418, {"x-two": "2"})

    async with pair(answer) as both:
        made = await both.ask(asking())
        assert both.kinds() == ["HandleFrame", "RespondFrame"]
    assert (made.status, made.headers["x-two"], await made.text()) == (418, "2", "made here")


async def test_a_body_that_is_read_is_sent_and_comes_back_with_the_request() -> None:
    async def read(request: Request, env: Any, context: HandlerContext) -> Request:
        assert len(await request.read()) == BIG
        return request

    async with pair(read) as both:
        made = await both.ask(asking(Pieces(BIG)))
        assert len(await made.read()) == BIG
        await until(lambda: not both.remote._exchanges)


async def test_a_body_may_be_replaced_as_it_streams() -> None:
    async def shout(request: Request, env: Any, context: HandlerContext) -> Request:
        body = request.body

        async def upper() -> AsyncIterator[bytes]:
            async for piece in body:
                yield piece.upper()

        return Request(request.method, request.url, request.headers, upper())

    async with pair(shout) as both:
        made = await both.ask(asking(Pieces(BIG)))
        assert await made.read() == b"X" * BIG
        await until(lambda: not both.remote._exchanges and not both.serving._streams._sent)


async def test_what_nobody_reads_is_not_sent_beyond_the_window() -> None:
    async def slowly(request: Request, env: Any, context: HandlerContext) -> Response:
        return Response(Pieces(100 * WINDOW))

    async with pair(slowly) as both:
        made = await both.ask(asking())
        pieces = aiter(made.body)
        first = await anext(pieces)
        await until(lambda: sum(isinstance(one, Piece) for one in both.said) > 4)
        for _ in range(200):
            await asyncio.sleep(0)
        sent = sum(len(one.data) for one in both.said if isinstance(one, Piece))
        assert len(first) <= sent <= 2 * WINDOW + 256 * 1024
        await pieces.aclose()
        await until(lambda: not both.serving._streams._sent)


async def test_a_forwarded_answer_is_passed_on_without_its_body() -> None:
    async def relay(request: Request, env: Any, context: HandlerContext) -> Response:
        request.headers["x-three"] = "3"
        response = await context.forward(request, to="http://127.0.0.1:9")
        response.headers["x-seen"] = "yes"
        return response

    body = Pieces(BIG)
    answer = Response(body, 201, {"content-type": "text/plain"})
    upstream = Upstream(answer)
    async with pair(relay) as both:
        made = await both.ask(asking(Pieces(BIG)), upstream)
        assert both.kinds() == ["HandleFrame", "ForwardFrame", "ForwardedFrame", "RespondFrame"]
    assert made.body is answer.body
    assert (made.status, made.headers["x-seen"], body.read) == (201, "yes", 0)
    ((request, to),) = upstream.forwarded
    assert (request.headers["x-three"], to) == ("3", "http://127.0.0.1:9")
    assert request.body.untouched


async def test_a_forwarded_answer_may_be_read_and_edited() -> None:
    async def edit(request: Request, env: Any, context: HandlerContext) -> Response:
        first = await context.forward(request)
        second = await context.forward(Request("GET", "https://a.test/again"))
        return Response(await first.read() + await second.read())

    upstream = Upstream(Response(Pieces(BIG)), Response("the end"))
    async with pair(edit) as both:
        made = await both.ask(asking(), upstream)
        assert await made.read() == b"x" * BIG + b"the end"


async def test_a_refusal_keeps_its_reason() -> None:
    async def refuse(request: Request, env: Any, context: HandlerContext) -> Request:
        raise Refused("not on a monday")

    async with pair(refuse) as both:
        with pytest.raises(Refused, match="not on a monday"):
            await both.ask(asking())


@pytest.mark.parametrize("what", ["error", "nothing", "half a body"])
async def test_a_handler_that_fails_tells_its_kind_and_no_secret(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(request: Request, env: Any, context: HandlerContext) -> Any:
        if what == "error":
            raise KeyError("s3cret")
        if what == "nothing":
            return None
        await anext(aiter(request.body))
        return request

    async with pair(fail) as both:
        with pytest.raises(HandlerFailed) as caught:
            await both.ask(asking(Pieces(BIG)))
    kind = {"error": "KeyError", "nothing": "TypeError", "half a body": "ValueError"}[what]
    assert caught.value.kind == kind
    assert "s3cret" not in str(caught.value)
    assert "failed" in caplog.text


async def test_a_body_that_breaks_off_is_an_error_for_its_reader() -> None:
    async def breaking(request: Request, env: Any, context: HandlerContext) -> Response:
        async def body() -> AsyncIterator[bytes]:
            yield b"begun"
            raise RuntimeError("s3cret")

        return Response(body())

    async with pair(breaking) as both:
        made = await both.ask(asking())
        with pytest.raises(ConnectionError, match="broke off with RuntimeError"):
            await made.read()


async def test_what_cannot_be_forwarded_is_an_error_in_the_handler() -> None:
    class Broken(Upstream):
        async def forward(self, request: Request, *, to: str | None = None) -> Response:
            raise OSError("no such host")

    async def relay(request: Request, env: Any, context: HandlerContext) -> Response:
        try:
            return await context.forward(request)
        except ConnectionError as error:
            return Response(str(error), 599)

    async with pair(relay) as both:
        made = await both.ask(asking(), Broken())
        assert (made.status, await made.text()) == (599, "no such host")


async def test_several_requests_are_handled_at_a_time() -> None:
    gate, waiting = asyncio.Event(), 0

    async def wait(request: Request, env: Any, context: HandlerContext) -> Request:
        nonlocal waiting
        waiting += 1
        await gate.wait()
        return request

    async with pair(wait) as both, asyncio.TaskGroup() as group:
        asked = [group.create_task(both.ask(asking())) for _ in range(50)]
        await until(lambda: waiting == 50)
        gate.set()
        assert len([await one for one in asked]) == 50


async def test_a_caller_that_leaves_cancels_the_handler() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(request: Request, env: Any, context: HandlerContext) -> Request:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return request

    async with pair(hang) as both:
        task = asyncio.create_task(both.ask(asking(Pieces(BIG))))
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])
        async with asyncio.timeout(SECONDS):
            await cancelled.wait()
        assert not both.remote._exchanges


async def test_a_client_that_goes_away_is_a_refusal() -> None:
    begun = asyncio.Event()

    async def hang(request: Request, env: Any, context: HandlerContext) -> Request:
        begun.set()
        await asyncio.Event().wait()
        return request

    async with pair(hang) as both:
        task = asyncio.create_task(both.ask(asking()))
        await begun.wait()
        await both.remote.aclose()
        with pytest.raises(Refused, match="went away"):
            await task
        with pytest.raises(Refused, match="went away"):
            await both.ask(asking())


async def test_a_slot_that_the_client_has_no_more_is_refused() -> None:
    async with pair(bearer("s3cret")) as both:
        both.handlers.clear()
        with pytest.raises(Refused, match="taken that handler away"):
            await both.ask(asking())


async def test_slots_are_served_once_they_are_told() -> None:
    async with pair(bearer("s3cret")) as both:
        await both.remote.hear(ServeFrame(number=7, slots=["a.test", ""]))
        assert set(both.remote.slots) == {"a.test", ""}
        await until(lambda: both.said)
        assert both.said == [ServingFrame(number=7)]


async def test_what_a_client_says_out_of_turn_is_ignored() -> None:
    async with pair(bearer("s3cret")) as both:
        send = SendFrame(id=99, method="GET", url="x", headers=[], content=msgspec.UNSET)  # type: ignore[arg-type]
        await both.remote.hear(send)
        await both.remote.hear(Piece(99, 1, b"data"))
        assert (await both.ask(asking())).headers["authorization"]


@pytest.mark.parametrize("frame", [b"", b"1234567", "{}", "[]", '{"type": "handle"}', "x"])
def test_frames_that_make_no_sense_are_value_errors(frame: str | bytes) -> None:
    with pytest.raises(ValueError):
        from_client(frame)
    with pytest.raises(ValueError):
        from_server(frame)


def test_frames_come_back_as_they_were() -> None:
    frame = HandleFrame(
        id=1, slot="", rule="outbound", method="GET", url="u", headers=[("a", "b")], body=True
    )
    assert from_server(msgspec.json.encode(frame).decode()) == frame
    piece = Piece(1, 2, b"data")
    assert from_client(piece.pack()) == from_server(piece.pack()) == piece
