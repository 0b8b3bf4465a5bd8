"""Errors over the wire: class, message, hint and fields are kept."""

from __future__ import annotations

import msgspec
import pytest

from smokebox import errors
from smokebox.errors import PathError, SmokeboxError
from smokebox.wire.codec import decode
from smokebox.wire.failure import Failure, FailureResponse, error_of, failure_of, status_of

ERROR_CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, SmokeboxError)
]


def round_trip(error: SmokeboxError) -> SmokeboxError:
    """Encode an error as the server does, and decode it as a client does."""
    body = msgspec.json.encode(FailureResponse(failure_of(error, "r1")))
    return error_of(decode(FailureResponse, body).error)


@pytest.mark.parametrize("kind", ERROR_CLASSES, ids=lambda kind: str(kind.__name__))
def test_error_keeps_its_class_and_fields(kind: type[SmokeboxError]) -> None:
    error = kind("/a/path" if issubclass(kind, PathError) else "it failed.", hint="Fix it.", n=1)
    decoded = round_trip(error)
    assert type(decoded) is kind
    assert (decoded.message, decoded.hint) == (error.message, "Fix it.")
    assert (decoded.fields["n"], decoded.fields["request_id"]) == (1, "r1")
    if isinstance(decoded, PathError):
        assert decoded.path == "/a/path"


@pytest.mark.parametrize("kind", ERROR_CLASSES, ids=lambda kind: str(kind.__name__))
def test_error_has_an_http_error_status(kind: type[SmokeboxError]) -> None:
    assert 400 <= status_of(kind) < 600


def test_error_codes_are_unique() -> None:
    codes = [kind.code for kind in ERROR_CLASSES]
    assert len(set(codes)) == len(codes)


def test_unknown_code_becomes_the_root_class() -> None:
    decoded = error_of(Failure(code="not_invented", message="it failed."))
    assert (type(decoded), decoded.message) == (SmokeboxError, "it failed.")


def test_fields_that_cannot_be_sent_are_left_out() -> None:
    decoded = round_trip(SmokeboxError("x", good=["a", 1, None], bad=object(), worse={"a": 1}))
    assert decoded.fields == {"good": ["a", 1, None], "request_id": "r1"}
