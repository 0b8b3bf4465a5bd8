"""Checks a model's arguments against a tool's schema, with an error the model can mend."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from smokebox.errors import InvalidOption

# In the order in which a value is named: every integer is a number too.
_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list, tuple),
    "object": (Mapping,),
}


def check_arguments(tool: str, schema: Mapping[str, object], given: object) -> dict[str, object]:
    """The arguments that were given, ready to be keywords, or `InvalidOption` with all faults.

    An optional argument that is null counts as left out, and 3.0 counts as the integer 3.
    Knows `type`, `enum`, the four bounds of numbers, `minLength`, and what is nested in
    `properties`, `required`, `additionalProperties` and `items`; passes what it does not know.
    """
    if not isinstance(given, Mapping):
        raise InvalidOption(
            f"{tool}: the arguments must be an object, not {_kind(given)}.",
            hint=f"It takes: {_names(schema)}.",
        )
    tidy = _tidy_object(schema, given)
    faults = list(_faults_of_object("", schema, tidy))
    if faults:
        raise InvalidOption(f"{tool}: " + " ".join(faults), hint=f"It takes: {_names(schema)}.")
    return tidy


def _tidy(schema: Mapping[str, object], value: object) -> object:
    if isinstance(value, Mapping):
        return _tidy_object(schema, value)
    if isinstance(value, float) and schema.get("type") == "integer" and value.is_integer():
        return int(value)
    return value


def _tidy_object(schema: Mapping[str, object], value: Mapping[object, object]) -> dict[str, object]:
    known, required = _properties(schema), _required(schema)
    return {
        str(name): _tidy(known.get(str(name), {}), item)
        for name, item in value.items()
        if item is not None or str(name) in required or str(name) not in known
    }


def _faults(name: str, schema: Mapping[str, object], value: object) -> Iterator[str]:
    wanted = schema.get("type")
    kinds = [wanted] if isinstance(wanted, str) else list(cast("Sequence[str]", wanted or ()))
    if kinds and not any(_is(kind, value) for kind in kinds):
        expected = " or ".join(map(_named, kinds))
        yield f"{name!r} must be {expected}, not {_kind(value)}: {_shorten(value)}."
    elif "enum" in schema and value not in cast("Sequence[object]", schema["enum"]):
        yield f"{name!r} must be one of {_shorten(schema['enum'])}, not {_shorten(value)}."
    elif isinstance(value, str):
        yield from _faults_of_text(name, schema, value)
    elif isinstance(value, (int, float)):
        yield from _faults_of_number(name, schema, value)
    elif isinstance(value, (list, tuple)) and isinstance(schema.get("items"), Mapping):
        for index, item in enumerate(value):
            yield from _faults(
                f"{name}[{index}]", cast("Mapping[str, object]", schema["items"]), item
            )
    elif isinstance(value, Mapping):
        yield from _faults_of_object(name, schema, value)


def _faults_of_object(
    name: str, schema: Mapping[str, object], value: Mapping[str, object]
) -> Iterator[str]:
    known, prefix = _properties(schema), f"{name}." if name else ""
    closed = schema.get("additionalProperties") is False
    strangers = [key for key in value if closed and key not in known]
    near = {key: difflib.get_close_matches(key, known, n=1, cutoff=0.5) for key in strangers}
    for key, meant in near.items():
        mend = f" Did you mean {meant[0]!r}?" if meant else ""
        yield f"there is no parameter {prefix + key!r}.{mend}"
    for key in _required(schema):
        if key not in value and [key] not in near.values():
            yield f"the parameter {prefix + key!r} is missing."
    for key in known:
        if key in value:
            yield from _faults(prefix + key, known[key], value[key])


def _faults_of_text(name: str, schema: Mapping[str, object], value: str) -> Iterator[str]:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        yield f"{name!r} holds half a surrogate pair at character {error.start}: not valid Unicode."
    if len(value) < cast("int", schema.get("minLength", 0)):
        yield f"{name!r} must not be empty."


def _faults_of_number(name: str, schema: Mapping[str, object], value: float) -> Iterator[str]:
    bounds = {key: cast("float", bound) for key, bound in schema.items() if "imum" in key.lower()}
    if value < bounds.get("minimum", value):
        yield f"{name!r} must be at least {bounds['minimum']}, not {value}."
    if value > bounds.get("maximum", value):
        yield f"{name!r} must be at most {bounds['maximum']}, not {value}."
    # Written so that NaN, which compares with nothing, is refused.
    if "exclusiveMinimum" in bounds and not value > bounds["exclusiveMinimum"]:
        yield f"{name!r} must be more than {bounds['exclusiveMinimum']}, not {value}."
    if "exclusiveMaximum" in bounds and not value < bounds["exclusiveMaximum"]:
        yield f"{name!r} must be less than {bounds['exclusiveMaximum']}, not {value}."


def _is(kind: str, value: object) -> bool:
    # A bool is an int in Python, and is not one in JSON.
    return isinstance(value, _TYPES[kind]) and (kind == "boolean") == isinstance(value, bool)


def _named(kind: str) -> str:
    if kind == "null":
        return kind
    return f"an {kind}" if kind[0] in "aio" else f"a {kind}"


def _kind(value: object) -> str:
    return next((_named(kind) for kind in _TYPES if _is(kind, value)), type(value).__name__)


def _shorten(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _properties(schema: Mapping[str, object]) -> Mapping[str, Mapping[str, object]]:
    return cast("Mapping[str, Mapping[str, object]]", schema.get("properties", {}))


def _required(schema: Mapping[str, object]) -> Sequence[str]:
    return cast("Sequence[str]", schema.get("required", ()))


def _names(schema: Mapping[str, object]) -> str:
    required = _required(schema)
    return ", ".join(
        name if name in required else f"{name} (optional)" for name in _properties(schema)
    )
