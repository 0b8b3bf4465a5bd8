"""Errors as the record keeps them."""

from __future__ import annotations

from typing import Any

import msgspec

from smokebox.errors import SmokeboxError
from smokebox.wire.failure import Failure, error_of, failure_of


def recorded(error: BaseException) -> dict[str, Any]:
    """What the record has of an error."""
    if not isinstance(error, SmokeboxError):
        error = SmokeboxError(f"{type(error).__name__}: {error}")
    made: dict[str, Any] = msgspec.to_builtins(failure_of(error))
    return {name: value for name, value in made.items() if value not in ("", None, {}, False)}


def restored(kept: dict[str, Any] | None) -> SmokeboxError:
    """The error that the record has, as the class that it was."""
    return error_of(msgspec.convert(kept or {"code": "error", "message": ""}, Failure))
