"""Errors over the wire: the same class, message, hint and fields on the other side."""

from __future__ import annotations

import msgspec
import pytest

from smokebox import errors
from smokebox.errors import PathError, SmokeboxError
from smokebox.wire.codec import decode
from smokebox.wire.failure import Failure, FailureResponse, error_of, failure_of, status_of

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, SmokeboxError)
]


def sent(error: SmokeboxError) -> SmokeboxError:
    """What arrives of an error."""
    body = msgspec.json.encode(FailureResponse(failure_of(error, "r1")))
    return error_of(decode(FailureResponse, body).error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_every_error_arrives_as_itself(kind: type[SmokeboxError]) -> None:
    error = kind("/a/path" if issubclass(kind, PathError) else "it failed.", hint="Mend it.", n=1)
    found = sent(error)
    assert type(found) is kind
    assert (found.message, found.hint) == (error.message, "Mend it.")
    assert (found.fields["n"], found.fields["request_id"]) == (1, "r1")
    if isinstance(found, PathError):
        assert found.path == "/a/path"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_every_error_has_a_status_of_an_error(kind: type[SmokeboxError]) -> None:
    assert 400 <= status_of(kind) < 600


def test_every_code_is_of_one_class() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)


def test_an_error_of_a_later_server_is_the_root() -> None:
    found = error_of(Failure(code="not_invented", message="odd."))
    assert (type(found), found.message) == (SmokeboxError, "odd.")


def test_what_cannot_be_sent_is_left_out() -> None:
    found = sent(SmokeboxError("x", good=["a", 1, None], bad=object(), worse={"a": 1}))
    assert found.fields == {"good": ["a", 1, None], "request_id": "r1"}
