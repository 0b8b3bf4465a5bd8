"""Errors of the bridge protocol, and our errors translated to them."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from smokebox.errors import Forbidden, LimitReached, SmokeboxError
from smokebox.wire.failure import Failure, failure_of, status_of

INVALID = "invalid_request"
_CODES = {
    "invalid_option": INVALID,
    "invalid_path": INVALID,
    "not_text": INVALID,
    "request_too_large": "payload_too_large",
    "limit_reached": "capacity_exceeded",
}


class BridgeErrorBody(msgspec.Struct):
    """An error: `error` is for people, `code` for programs."""

    error: str
    code: str


class BridgeError(Exception):
    """An error response of this protocol."""

    def __init__(self, status: int, message: str, code: str = INVALID) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code

    @property
    def body(self) -> bytes:
        """The body of the response, or the data of a stream's last event."""
        return msgspec.json.encode(BridgeErrorBody(self.message, self.code))

    @property
    def response(self) -> Response:
        """The error as a response."""
        return Response(self.body, self.status, media_type="application/json")


def bridge_error(error: SmokeboxError) -> BridgeError:
    """Translate one of our errors."""
    return translate_failure(failure_of(error), status_of(type(error)))


def translate_failure(failure: Failure, status: int) -> BridgeError:
    """Translate an error of the native API that has already been encoded.

    Clients of this protocol retry only after status 503.
    """
    text = f"{failure.message} {failure.hint}".strip()
    status = 503 if failure.retryable else status
    return BridgeError(status, text, _CODES.get(failure.code, failure.code))


def operation_failed(operation: str, error: SmokeboxError, code: str) -> BridgeError:
    """Return the error of an operation: refused (403, 429), failed (502), or to retry (503)."""
    if error.retryable or isinstance(error, (Forbidden, LimitReached)):
        return bridge_error(error)
    return BridgeError(502, f"{operation} failed: {error}", code)
