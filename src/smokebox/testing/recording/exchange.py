"""One request to a provider with its answer, and the file that they are kept in."""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.errors import InvalidOption, NotFound

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1
# Providers give what they call an id of their own each time; what counts is which is which.
_IDS = ("id", "call_id", "tool_use_id", "tool_call_id", "item_id")
_MOST_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request and its answer, in the pieces that it came in.

    No header of the request is kept, so that no key is. `whole` is whether the answer came to
    its end.
    """

    path: str
    body: Any
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[str]
    whole: bool = True

    @property
    def key(self) -> str:
        """The same for requests that ask for the same."""
        return f"{self.path} {canonical(self.body)}"


@dataclass(slots=True)
class Recording:
    """What is in a file: exchanges, and how the providers of them are spoken to."""

    apis: dict[str, str] = field(default_factory=dict)
    exchanges: list[Exchange] = field(default_factory=list)


def canonical(body: object) -> str:
    """A body as text, in which ids are numbered in the order in which they come."""
    return json.dumps(_numbered(body, {}), sort_keys=True, indent=1)


def _numbered(value: object, known: dict[str, str]) -> object:
    if isinstance(value, list):
        return [_numbered(item, known) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: known.setdefault(item, f"#{len(known) + 1}")
        if name in _IDS and isinstance(item, str)
        else _numbered(item, known)
        for name, item in value.items()
    }


def difference(wanted: str, had: str) -> str:
    """Where two requests differ, in a few lines."""
    lines = difflib.unified_diff(had.splitlines(), wanted.splitlines(), lineterm="", n=0)
    told = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    more = [f"and {len(told) - _MOST_LINES} lines more"] if len(told) > _MOST_LINES else []
    return "\n".join([*told[:_MOST_LINES], *more])


def read(file: Path) -> Recording:
    """What a file has. Raises `NotFound` and `InvalidOption`."""
    try:
        first, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        version = first["version"]
        if version == VERSION:
            return Recording(first["apis"], [Exchange(**line) for line in lines])
    except FileNotFoundError:
        raise NotFound(
            f"there is no recording {os.fspath(file)!r}.",
            hint="Run once with SMOKEBOX_RECORD=1, and with the key of the provider.",
            kind="recording",
            name=os.fspath(file),
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise _unreadable(file, "is no recording of models") from error
    raise _unreadable(file, f"is of version {version}, and this Smokebox reads {VERSION}")


def write(file: Path, recording: Recording) -> None:
    """Keep it, all or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    first = {"version": VERSION, "apis": recording.apis}
    lines = [first, *map(asdict, recording.exchanges)]
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    beside.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    beside.replace(file)


def _unreadable(file: Path, why: str) -> InvalidOption:
    return InvalidOption(
        f"{os.fspath(file)!r} {why}.",
        hint="Make it again with SMOKEBOX_RECORD=1.",
        option="file",
        value=os.fspath(file),
    )
