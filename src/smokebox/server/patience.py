"""Answers that take long: the caller hears that we live, and one who leaves ends the work."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from smokebox.errors import SmokeboxError
from smokebox.wire import HEARTBEAT
from smokebox.wire.failure import FailureAnswer, failure_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")


async def answer_patiently(
    scope: Scope,
    receive: Receive,
    send: Send,
    work: Callable[[], Awaitable[Any]],
    respond: Callable[[Any], Response],
) -> None:
    """Answer with what `work` gives; before that, after a while, with blanks.

    JSON may begin with blanks. With the first of them the status is sent, 200, so an error
    after it is told by the body alone. Work whose caller has left is cancelled.
    """
    task = asyncio.ensure_future(_awaited(work))
    left = asyncio.ensure_future(left_by(receive))
    try:
        await asyncio.wait((task, left), timeout=HEARTBEAT, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await respond(task.result())(scope, receive, send)
        elif not left.done():
            await _beat(scope, send, task, left, respond)
    finally:
        left.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _beat(
    scope: Scope,
    send: Send,
    task: asyncio.Future[Any],
    left: asyncio.Future[None],
    respond: Callable[[Any], Response],
) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while not task.done() and not left.done():
        await send({"type": "http.response.body", "body": b"\n", "more_body": True})
        await asyncio.wait((task, left), timeout=HEARTBEAT, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        return
    try:
        body = bytes(respond(task.result()).body)
    except SmokeboxError as error:
        failure = failure_of(error, str(scope["smokebox.request_id"]))
        body = msgspec.json.encode(FailureAnswer(failure))
    await send({"type": "http.response.body", "body": body})


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


async def left_by(receive: Receive) -> None:
    """Return when the caller has left. For requests whose body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
