"""The code interpreter: runs of code, and contexts that keep state between them."""

from __future__ import annotations

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
from smokebox.foundation import sse
from smokebox.foundation.ids import new_id
from smokebox.server.endpoint import ApiCall, endpoint
from smokebox.server.idempotency import Creation
from smokebox.server.responses import EventResponse, event
from smokebox.types import CodeContextInfo, CodeError, CodeExecution, OutputChunk
from smokebox.wire.requests import CreateCodeContext, RunCode
from smokebox.wire.responses import CodeContexts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_LOOKUP_ERRORS = (InvalidOption, NotFound)
_CREATE_ERRORS = (
    InvalidOption,
    InvalidPath,
    PathError,
    Conflict,
    LimitReached,
    DeadlineExceeded,
    SandboxGone,
    Unsupported,
)
_RUN_ERRORS = (*_CREATE_ERRORS, NotFound, ProcessEnded, ServiceUnavailable)


@endpoint("POST", "/sandboxes/{id}/code", errors=_RUN_ERRORS, slow=True)
async def run(call: ApiCall, body: RunCode) -> CodeExecution:
    """Run code and wait for it.

    An exception in the code is a result. Closing the connection interrupts the code. After five
    seconds the response starts with whitespace, and an error is then only in its body.
    """
    execution = await call.sandbox.contexts.run(**_options(body))
    call.state.metrics.count_execution(execution)
    return execution


@endpoint("POST", "/sandboxes/{id}/code/stream", errors=_RUN_ERRORS, returns=sse.MEDIA)
async def stream(call: ApiCall, body: RunCode) -> EventResponse:
    """Run code and stream its output and results.

    Events: `output` with a piece of one stream, `result` with a displayed value, `exception` if
    the code raised one, and last `execution`, without the output and results sent before, or
    `error`. Closing the connection interrupts the code.
    """
    return EventResponse(call, _events(call, body))


@endpoint("GET", "/sandboxes/{id}/code/contexts")
async def list_all(call: ApiCall) -> CodeContexts:
    """List the code contexts of a sandbox, in order of creation."""
    return CodeContexts([context.info for context in await call.sandbox.contexts.list()])


@endpoint("POST", "/sandboxes/{id}/code/contexts", errors=_CREATE_ERRORS, status=201, slow=True)
async def create(call: ApiCall, body: CreateCodeContext) -> CodeContextInfo:
    """Create a code context, which keeps variables and imports between runs.

    It outlives this request and the server, and ends when the sandbox sleeps. With the header
    Idempotency-Key the request may be repeated, and creates one context.
    """

    async def create_with_id(id: str) -> CodeContextInfo:
        context = await call.sandbox.contexts.create(
            id, language=body.language, cwd=body.cwd, env=body.env, timeout=body.timeout
        )
        return context.info

    async def find(id: str) -> CodeContextInfo:
        return (await call.sandbox.contexts.get(id)).info

    id = body.id if body.id is not None else new_id("c")
    return await call.state.idempotency.once(
        call, body, Creation(kind="context", id=id, find=find, create=create_with_id)
    )


@endpoint(
    "GET",
    "/sandboxes/{id}/code/contexts/{context}",
    errors=(*_LOOKUP_ERRORS, ProcessEnded, SandboxGone),
)
async def get(call: ApiCall) -> CodeContextInfo:
    """Return the state of a context. For one that has ended, the error says why."""
    context = await call.sandbox.contexts.get(call.path_param("context"))
    context.check_running()
    return context.info


@endpoint(
    "DELETE",
    "/sandboxes/{id}/code/contexts/{context}",
    errors=(*_LOOKUP_ERRORS, ServiceUnavailable),
    slow=True,
)
async def delete(call: ApiCall) -> None:
    """Delete a context and kill the processes that its code started."""
    await call.sandbox.contexts.delete(call.path_param("context"))


async def _events(call: ApiCall, body: RunCode) -> AsyncGenerator[bytes, None]:
    async with call.sandbox.contexts.stream(**_options(body)) as events:
        async for item in events:
            if isinstance(item, OutputChunk):
                yield event("output", item)
            else:
                yield event("exception" if isinstance(item, CodeError) else "result", item)
        call.state.metrics.count_execution(events.execution)
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
