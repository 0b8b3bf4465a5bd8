"""How the bridge protocol says no: a status, and a body of `error` and `code`."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from smokebox.errors import SmokeboxError
from smokebox.wire.failure import Failure, failure_of, status_of

INVALID = "invalid_request"
_CODES = {
    "invalid_option": INVALID,
    "invalid_path": INVALID,
    "not_text": INVALID,
    "request_too_large": "payload_too_large",
    "limit_reached": "capacity_exceeded",
}


class Refusal(Exception):
    """An answer that is an error, as this protocol has it."""

    def __init__(self, status: int, message: str, code: str = INVALID) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code

    @property
    def body(self) -> bytes:
        """What the answer, or the last event of a stream, says."""
        return msgspec.json.encode({"error": self.message, "code": self.code})

    @property
    def response(self) -> Response:
        """The answer."""
        return Response(self.body, self.status, media_type="application/json")


def refusal_of(error: SmokeboxError) -> Refusal:
    """One of our errors, as this protocol has it."""
    return translated(failure_of(error), status_of(type(error)))


def translated(failure: Failure, status: int) -> Refusal:
    """An error of ours that is on its way out, as this protocol has it.

    503 is the only status that its clients take for one that may be tried again.
    """
    text = f"{failure.message} {failure.hint}".strip()
    status = 503 if failure.retryable else status
    return Refusal(status, text, _CODES.get(failure.code, failure.code))


def failed(doing: str, error: SmokeboxError, code: str) -> Refusal:
    """What the sandbox could not do. What can be tried again says so, whatever was done."""
    if error.retryable:
        return refusal_of(error)
    return Refusal(502, f"{doing} failed: {error}", code)
