"""Random ids."""

from __future__ import annotations

# Not `secrets`: its import slows the start of the command line.
from os import urandom


def new_id(prefix: str = "") -> str:
    """Return an id of 16 hex digits, unique within one server, as in `p-0123456789abcdef`."""
    digits = urandom(8).hex()
    return f"{prefix}-{digits}" if prefix else digits


def new_global_id(prefix: str = "") -> str:
    """Return an id of 32 hex digits, unique everywhere and impossible to guess."""
    digits = urandom(16).hex()
    return f"{prefix}-{digits}" if prefix else digits
