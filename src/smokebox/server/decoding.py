"""From the bytes of a request to a value that is checked, or an error that names the field."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar, get_origin, get_type_hints
from urllib.parse import parse_qsl

import msgspec

from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown
from smokebox.wire.codec import decode

if TYPE_CHECKING:
    from starlette.datastructures import Headers

T = TypeVar("T")

_lists: dict[type, frozenset[str]] = {}

_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`(?: - at `\$(.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*?)`")
_AT = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)


def decode_body(kind: type[T], headers: Headers, data: bytes) -> T:
    """A JSON body as what it is to be. An empty one is an empty object."""
    media = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # A web page of somebody else's can send other types without asking first.
    if data and media != "application/json":
        raise InvalidOption(
            f"the body of this request is {media!r}, not 'application/json'.",
            hint="Set the header Content-Type: application/json.",
            option="content-type",
            value=media,
        )
    try:
        return decode(kind, data or b"{}")
    except msgspec.ValidationError as error:
        raise _explain(error, kind, "the body") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidOption(
            f"the body of this request is not JSON: {error}.",
            hint="Send a JSON object.",
            option="body",
        ) from error


def decode_query(kind: type[T], query: bytes) -> T:
    """The query of a URL as what it is to be."""
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, errors="strict")
    except ValueError as error:
        raise InvalidOption(
            f"the query is not text: {error}.",
            hint="Rename what has such a name with a command (`mv`), and use its new name.",
            option="query",
            value=query.decode("latin-1"),
        ) from error
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in _repeatable(kind):
            fields.setdefault(name, []).append(value)
        elif name in fields:
            raise InvalidOption(
                f"{name} is given more than once.", hint="Give it once.", option=name, value=value
            )
        else:
            fields[name] = value
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _explain(error, kind, "the query") from error


def _repeatable(kind: type) -> frozenset[str]:
    """The fields that are lists, and may be given several times."""
    if kind not in _lists:
        _lists[kind] = frozenset(
            name
            for name, hint in get_type_hints(kind).items()
            if any(get_origin(one) is list for one in (hint, *_members(hint)))
        )
    return _lists[kind]


def _members(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__args__", ())


def _explain(error: msgspec.ValidationError, kind: type, where: str) -> InvalidOption:
    text = str(error)
    if (unknown := _UNKNOWN.fullmatch(text)) and not unknown[2]:
        try:
            refuse_unknown(where, [unknown[1]], get_type_hints(kind))
        except InvalidOption as better:
            return better
    if missing := _MISSING.match(text):
        return InvalidOption(
            f"{where} lacks {missing[1]!r}.", hint="Add it.", option=missing[1], value=None
        )
    found = _AT.fullmatch(text)
    what, field = (found[1], found[2]) if found else (text, "")
    return InvalidOption(
        f"{field or where}: {what[:1].lower()}{what[1:]}.",
        hint="See /api/openapi.json for what it takes.",
        option=field or where,
    )
