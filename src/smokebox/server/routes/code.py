"""Code, in contexts that keep what it did for the code after it."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from smokebox.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidOption,
    InvalidPath,
    LimitReached,
    NotFound,
    PathError,
    ProcessEnded,
    SandboxGone,
    ServiceUnavailable,
    Unsupported,
)
from smokebox.server.call import Call
from smokebox.server.endpoint import endpoint
from smokebox.server.events import EventResponse, event
from smokebox.server.idempotency import Making
from smokebox.types import CodeContextInfo, CodeError, CodeExecution, OutputChunk
from smokebox.wire import sse
from smokebox.wire.answers import CodeContexts
from smokebox.wire.requests import CreateCodeContext, RunCode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_NAMING = (InvalidOption, NotFound)
_MAKING = (
    InvalidOption,
    InvalidPath,
    PathError,
    Conflict,
    LimitReached,
    DeadlineExceeded,
    SandboxGone,
    Unsupported,
)
_RUNNING = (*_MAKING, NotFound, ProcessEnded, ServiceUnavailable)


@endpoint("POST", "/sandboxes/{id}/code", errors=_RUNNING, slow=True)
async def run(call: Call, body: RunCode) -> CodeExecution:
    """Run code and wait for it.

    An error in the code is a result. Closing the connection interrupts the code. After five
    seconds the answer begins, with blanks, and an error is then told by the body alone.
    """
    execution = await call.sandbox.contexts.run(**_options(body))
    call.state.metrics.executed(execution)
    return execution


@endpoint("POST", "/sandboxes/{id}/code/stream", errors=_RUNNING, gives=sse.MEDIA)
async def stream(call: Call, body: RunCode) -> EventResponse:
    """Run code and give what it writes and shows as it comes.

    Events: `output` with a piece of one stream, `result` with something that was shown,
    `exception` with what the code ended with, and last `execution`, without what was given
    before, or `error`. Closing the connection interrupts the code.
    """
    return EventResponse(call, _events(call, body))


@endpoint("GET", "/sandboxes/{id}/code/contexts")
async def list_all(call: Call) -> CodeContexts:
    """List the code contexts of a sandbox, in the order in which they were made."""
    return CodeContexts([context.info for context in await call.sandbox.contexts.list()])


@endpoint("POST", "/sandboxes/{id}/code/contexts", errors=_MAKING, status=201, slow=True)
async def create(call: Call, body: CreateCodeContext) -> CodeContextInfo:
    """Make a context, in which code finds what the code before it did.

    It outlives this request and the server, and ends with the sleep of the sandbox. With the
    header Idempotency-Key the request may be repeated, and makes one.
    """

    async def make(id: str) -> CodeContextInfo:
        context = await call.sandbox.contexts.create(
            id, language=body.language, cwd=body.cwd, env=body.env, timeout=body.timeout
        )
        return context.info

    async def find(id: str) -> CodeContextInfo:
        return (await call.sandbox.contexts.get(id)).info

    id = body.id if body.id is not None else f"c-{secrets.token_hex(6)}"
    making = Making(kind="context", id=id, find=find, make=make)
    return await call.state.requests.once(call, body, making)


@endpoint(
    "GET",
    "/sandboxes/{id}/code/contexts/{context}",
    errors=(*_NAMING, ProcessEnded, SandboxGone),
)
async def get(call: Call) -> CodeContextInfo:
    """What is known of a context. One that has ended says why."""
    context = await call.sandbox.contexts.get(call.part("context"))
    context.check()
    return context.info


@endpoint(
    "DELETE",
    "/sandboxes/{id}/code/contexts/{context}",
    errors=(*_NAMING, ServiceUnavailable),
    slow=True,
)
async def delete(call: Call) -> None:
    """End a context with all that its code started, and forget it."""
    await call.sandbox.contexts.delete(call.part("context"))


async def _events(call: Call, body: RunCode) -> AsyncGenerator[bytes, None]:
    async with call.sandbox.contexts.stream(**_options(body)) as events:
        async for one in events:
            if isinstance(one, OutputChunk):
                yield event("output", one)
            else:
                yield event("exception" if isinstance(one, CodeError) else "result", one)
        call.state.metrics.executed(events.execution)
        yield event("execution", events.execution)


def _options(body: RunCode) -> dict[str, Any]:
    return {
        "code": body.code,
        "context": body.context,
        "language": body.language,
        "env": body.env,
        "timeout": body.timeout,
    }


ENDPOINTS = [run, stream, list_all, create, get, delete]
