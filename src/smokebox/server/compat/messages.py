"""Bodies in JSON. Fields that nobody knows are for other servers, and pass."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.responses import Response

from smokebox.server.compat.refusal import Refusal

T = TypeVar("T")


def decoded(kind: type[T], data: bytes) -> T:
    """A body as what it is to be."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise Refusal(400, f"Invalid body: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, "Invalid JSON body") from error


def answer(value: object) -> Response:
    """A value as the answer."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def ok() -> Response:
    """The answer of what has nothing to tell."""
    return answer({"ok": True})
