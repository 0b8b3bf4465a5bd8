"""Errors on the wire: the code and the HTTP status of every class in `smokebox.errors`."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from smokebox import errors
from smokebox.errors import PathError, SmokeboxError

# A class that is not listed has the status of its nearest listed ancestor.
STATUS: dict[type[SmokeboxError], int] = {
    SmokeboxError: 500,
    errors.InvalidOption: 400,
    errors.InvalidPath: 400,
    errors.Unauthorized: 401,
    errors.Forbidden: 403,
    errors.PathError: 400,
    errors.PathNotFound: 404,
    errors.PathExists: 409,
    errors.DirectoryNotEmpty: 409,
    errors.AccessDenied: 403,
    errors.FileTooLarge: 413,
    errors.StorageFull: 507,
    errors.NotText: 400,
    errors.Unsupported: 501,
    errors.BucketNotFound: 404,
    errors.ServiceUnavailable: 503,
    errors.DeadlineExceeded: 504,
    errors.SandboxGone: 410,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.ProcessEnded: 409,
    errors.RequestTooLarge: 413,
    errors.LimitReached: 429,
    errors.IsolationUnavailable: 501,
    errors.BadSnapshot: 400,
    errors.GitError: 422,
    errors.ImageError: 422,
    errors.RegistryError: 422,
    errors.InvalidDockerfile: 400,
    errors.BuildFailed: 422,
    errors.MissingDependency: 501,
    errors.ModelError: 502,
    errors.ModelUnavailable: 503,
    errors.ContextOverflow: 413,
    errors.SessionBusy: 409,
    errors.Fenced: 409,
    errors.Aborted: 409,
    errors.ResultUnavailable: 502,
    errors.StoreTooNew: 501,
}


class Failure(msgspec.Struct, kw_only=True):
    """An error, for programs (`code`, `fields`) and for people (`message`, `hint`)."""

    code: str
    message: str
    hint: str = ""
    retryable: bool = False
    request_id: str = ""
    path: str | None = None
    fields: dict[str, Any] = {}


class FailureResponse(msgspec.Struct):
    """The body of an error response."""

    error: Failure


def status_of(kind: type[SmokeboxError]) -> int:
    """Return the HTTP status of a class of errors."""
    return next(STATUS[parent] for parent in kind.__mro__ if parent in STATUS)


def failure_of(error: SmokeboxError, request_id: str = "") -> Failure:
    """Encode an error for the wire, without fields that JSON cannot hold."""
    return Failure(
        code=error.code,
        message=error.message,
        hint=error.hint,
        retryable=error.retryable,
        request_id=request_id,
        path=error.path if isinstance(error, PathError) else None,
        fields={name: value for name, value in error.fields.items() if _is_plain(value)},
    )


def error_of(failure: Failure) -> SmokeboxError:
    """Decode an error to its class; one with an unknown code becomes a `SmokeboxError`."""
    kind = _by_code().get(failure.code, SmokeboxError)
    fields = dict(failure.fields)
    if failure.request_id:
        fields["request_id"] = failure.request_id
    if issubclass(kind, PathError):
        return kind(failure.path or "", failure.message, hint=failure.hint, **fields)
    return kind(failure.message, hint=failure.hint, **fields)


@functools.cache
def _by_code() -> dict[str, type[SmokeboxError]]:
    found: dict[str, type[SmokeboxError]] = {}
    waiting: list[type[SmokeboxError]] = [SmokeboxError]
    while waiting:
        kind = waiting.pop()
        found.setdefault(kind.code, kind)
        waiting += kind.__subclasses__()
    return found


def _is_plain(value: object, depth: int = 4) -> bool:
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_plain(one, depth - 1) for one in value)
    return value is None or isinstance(value, (str, int, float, bool))
