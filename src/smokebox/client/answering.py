"""What became of a request: a value, or an error of the class that the server raised."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from smokebox.errors import DeadlineExceeded, SandboxGone, ServiceUnavailable, SmokeboxError
from smokebox.wire.codec import decode
from smokebox.wire.failure import Failure, FailureAnswer, error_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from smokebox.client.connection import Address

T = TypeVar("T")

LOST = "connection lost"


class Answer(NamedTuple):
    """An answer that is whole; `retry_after` is seconds, None where the server did not say."""

    status: int
    body: bytes
    retry_after: float | None = None


def value_of(kind: type[T], answer: Answer) -> T:
    """An answer as a value of that kind (NoneType for none), or what went wrong, raised."""
    status, body, _ = answer
    if body.startswith(b"\n"):
        body = body.lstrip()
    if status >= 400:
        raise failure_of(answer)
    # Work that fails late has begun its answer with 200, and tells of it by the body alone.
    if status == 200 and b'"error"' in body[:256] and (failure := _failure(body)) is not None:
        raise error_of(failure)
    if kind is type(None):
        return None
    try:
        return decode(kind, body)
    except msgspec.MsgspecError as error:
        raise ServiceUnavailable(
            f"the server answered what this client does not understand: {error}.",
            hint="Have both of the same version: see `smokebox --version` on either side.",
            service="server",
        ) from error


def failure_of(answer: Answer) -> SmokeboxError:
    """The error that an answer tells of."""
    failure = _failure(answer.body)
    if failure is not None:
        return error_of(failure)
    return ServiceUnavailable(
        f"what is at that address answered {answer.status}, not as a Smokebox server does.",
        hint="Check SMOKEBOX_URL.",
        service="server",
        status=answer.status,
    )


def event_failure(data: bytes) -> SmokeboxError:
    """The error that the last event of a stream tells of."""
    return error_of(decode(Failure, data))


def _failure(body: bytes) -> Failure | None:
    try:
        return decode(FailureAnswer, body).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class Unconnected(Exception):
    """Nobody was there to connect to: nothing was sent."""


class Broken(Exception):
    """A connection broke, or fell silent."""


class Refused(Exception):
    """A WebSocket was asked for, and the answer was another."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}".rstrip())
        self.status = status


@contextlib.contextmanager
def losing(what: str) -> Iterator[None]:
    """Turn what is said of a connection that broke, or fell silent, into our own error."""
    try:
        yield
    except Broken as error:
        raise lost(what) from error


def lost(what: str) -> SandboxGone:
    """The error for a server that went away, or says nothing any more."""
    return SandboxGone(
        f"the server went away during {what}.",
        hint="Call again: the sandbox keeps its files, and its long-running processes.",
        reason=LOST,
    )


def is_lost(error: Exception) -> bool:
    """Whether an error says that there was no answer, of which another try may get one."""
    return isinstance(error, SandboxGone) and error.fields.get("reason") == LOST


def unreachable(address: Address, error: Unconnected) -> ServiceUnavailable:
    """The error for a server that nobody can connect to."""
    where = address.socket or address.base
    return ServiceUnavailable(
        f"no server answers at {where}: {error}.",
        hint="Start one with `smokebox up`, or set SMOKEBOX_URL to where it is.",
        service="server",
    )


@contextlib.asynccontextmanager
async def deadline(timeout: float, what: str) -> AsyncIterator[None]:
    """Raise `DeadlineExceeded` for what takes longer than `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout) as scope:
            yield
    except TimeoutError as error:
        if isinstance(error, SmokeboxError) or not scope.expired():
            raise
        raise DeadlineExceeded(
            f"{what} was not answered in {timeout:g} s.",
            hint="Pass a longer timeout, or look at the server with `smokebox status`.",
            operation=what,
            timeout=timeout,
        ) from None
