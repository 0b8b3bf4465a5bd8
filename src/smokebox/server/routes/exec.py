"""Commands in the foreground, with their output at the end or as a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.errors import (
    DeadlineExceeded,
    InvalidOption,
    LimitReached,
    PathError,
    SandboxGone,
    Unsupported,
)
from smokebox.foundation import sse
from smokebox.server.endpoint import ApiCall, endpoint
from smokebox.server.responses import EventResponse, event
from smokebox.types import ExecResult
from smokebox.wire.requests import Exec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from typing import Any

_ERRORS = (InvalidOption, PathError, SandboxGone, LimitReached, DeadlineExceeded, Unsupported)


@endpoint("POST", "/sandboxes/{id}/exec", errors=_ERRORS, slow=True)
async def run(call: ApiCall, body: Exec) -> ExecResult:
    """Run a command and wait for it.

    A command that fails is a result. Closing the connection kills the command. After five
    seconds the response starts with whitespace, and an error is then only in its body.
    """
    result = await call.sandbox.exec(**options(body))
    call.state.metrics.count_execution(result)
    return result


@endpoint("POST", "/sandboxes/{id}/exec/stream", errors=_ERRORS, returns=sse.MEDIA)
async def stream(call: ApiCall, body: Exec) -> EventResponse:
    """Run a command and stream its output.

    Events: `output` with a piece of one stream, and last `result`, or `error`. Closing the
    connection kills the command.
    """
    return EventResponse(call, _events(call, body))


async def _events(call: ApiCall, body: Exec) -> AsyncGenerator[bytes, None]:
    async with call.sandbox.exec_stream(**options(body)) as output:
        async for chunk in output:
            yield event("output", chunk)
        call.state.metrics.count_execution(output.result)
        yield event("result", output.result)


def options(body: Exec) -> dict[str, Any]:
    """Return the options of the engine's `exec` for a body."""
    if body.stdin is not None and body.stdin_base64 is not None:
        raise InvalidOption(
            "stdin and stdin_base64 exclude each other.",
            hint="Set one of them.",
            option="stdin_base64",
        )
    return {
        "command": body.command,
        "cwd": body.cwd,
        "env": body.env,
        "timeout": body.timeout,
        "stdin": body.stdin if body.stdin_base64 is None else body.stdin_base64,
        "user": body.user,
        "limits": body.limits,
        "session": body.session,
    }


ENDPOINTS = [run, stream]
