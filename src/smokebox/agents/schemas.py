"""JSON schemas: derived from Python types, simplified for providers, and checked."""

from __future__ import annotations

import difflib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError


_PREFIX = "#/$defs/"
# Keywords whose values are data, not schemas: a "$ref" or "title" in them is left alone.
_VALUES = {"default", "enum", "const", "examples", "required", "type"}
_NAMED_SCHEMAS = {"properties", "patternProperties"}


def inline(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Replace references in `schema` by their definitions, except recursive ones."""
    definitions: Mapping[str, Any] = schema.get("$defs", {})
    recursive = {name for name in definitions if name in _reached(definitions, name)}
    body = {key: value for key, value in schema.items() if key != "$defs"}
    root = str(body.get("$ref", "")).removeprefix(_PREFIX)
    if root in recursive:
        # Providers read the type of the root, and do not follow a reference to it.
        body = {**definitions[root], **{k: v for k, v in body.items() if k != "$ref"}}
    inlined: dict[str, Any] = _inline_node(body, definitions, recursive)
    kept = {
        name: _inline_node(definitions[name], definitions, recursive) for name in sorted(recursive)
    }
    return {**inlined, "$defs": kept} if kept else inlined


def wrapped(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of an object whose only property `name` has `schema`."""
    inner = {key: value for key, value in schema.items() if key != "$defs"}
    outer: dict[str, Any] = {
        "type": "object",
        "properties": {name: inner},
        "required": [name],
        "additionalProperties": False,
    }
    return {**outer, "$defs": schema["$defs"]} if "$defs" in schema else outer


def _inline_node(node: Any, definitions: Mapping[str, Any], recursive: set[str]) -> Any:
    if isinstance(node, list):
        return [_inline_node(item, definitions, recursive) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = str(node["$ref"]).removeprefix(_PREFIX)
        if name in recursive or name not in definitions:
            return {"$ref": node["$ref"]}
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return _inline_node({**definitions[name], **beside}, definitions, recursive)
    inlined: dict[str, Any] = {}
    for key, value in node.items():
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            inlined[key] = {k: _inline_node(v, definitions, recursive) for k, v in value.items()}
        elif key == "const":
            inlined["enum"] = [value]
        elif key == "oneOf":
            inlined["anyOf"] = _inline_node(value, definitions, recursive)
        elif key in _VALUES:
            inlined[key] = value
        elif key not in ("title", "discriminator"):
            inlined[key] = _inline_node(value, definitions, recursive)
    return inlined


def _reached(definitions: Mapping[str, Any], start: str) -> set[str]:
    """Return the definitions that `start` refers to, directly or not."""
    found: set[str] = set()
    waiting = list(_references(definitions[start]))
    while waiting:
        name = waiting.pop()
        if name in definitions and name not in found:
            found.add(name)
            waiting.extend(_references(definitions[name]))
    return found


def _references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"].removeprefix(_PREFIX)
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for item in node:
            yield from _references(item)


T = TypeVar("T")

MAX_FAULTS = 8
_MAX_SHOWN = 60


class JsonType(ABC, Generic[T]):
    """A Python type as JSON. `schema` has only recursive references."""

    schema: dict[str, Any]

    @staticmethod
    def of(kind: type[T] | object, what: str) -> JsonType[T]:
        """Return the JSON form of a type. Raises `InvalidOption`, naming `what`, if it has none."""
        failed = ""
        for form in (_PydanticType, _MsgspecType):
            try:
                json_type: JsonType[T] = form(kind)
            except ImportError:
                continue
            except Exception as error:
                failed = failed or str(error).split("\n")[0]
                continue
            if not json_type.schema:
                failed = "its schema is empty"
                break
            return json_type
        raise InvalidOption(
            f"{what}: no model can pass a value of type {_type_name(kind)}: {failed.rstrip('.')}.",
            hint="Use a pydantic model, a dataclass, a TypedDict, a msgspec.Struct, or plain "
            "types such as int, list[str] and Literal.",
            option=what,
            value=_type_name(kind),
        )

    @abstractmethod
    def read(self, value: object) -> T:
        """Convert decoded JSON to a value. Raises `ValueError` with all faults."""

    @abstractmethod
    def dump(self, value: T) -> object:
        """Convert a value to JSON values."""


class _PydanticType(JsonType[T]):
    def __init__(self, kind: Any) -> None:
        from pydantic import TypeAdapter

        self._adapter: TypeAdapter[T] = TypeAdapter(kind)
        self.schema = inline(self._adapter.json_schema())

    def read(self, value: object) -> T:
        from pydantic import ValidationError

        try:
            # Validate JSON, not Python: a strict model then still accepts a date as text.
            return self._adapter.validate_json(_encode(value))
        except ValidationError as error:
            raise ValueError(_faults(error)) from error

    def dump(self, value: T) -> object:
        return self._adapter.dump_python(value, mode="json")


class _MsgspecType(JsonType[T]):
    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind, strict=False)
        self.schema = inline(msgspec.json.schema(kind))

    def read(self, value: object) -> T:
        try:
            return self._decoder.decode(_encode(value))
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error

    def dump(self, value: T) -> object:
        return msgspec.to_builtins(value)


def _encode(value: object) -> str:
    # msgspec cannot encode integers beyond 64 bits; the stdlib can.
    return json.dumps(value, allow_nan=False)


def _faults(error: ValidationError) -> str:
    faults = error.errors(include_url=False, include_context=False)
    lines = [_fault(cast("dict[str, Any]", fault)) for fault in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        lines.append(f"and {len(faults) - MAX_FAULTS} more.")
    return "\n".join(lines)


def _fault(fault: dict[str, Any]) -> str:
    place = ""
    for step in fault["loc"]:
        place += f"[{step}]" if isinstance(step, int) else f".{step}"
    message = f"{place.lstrip('.')}: {fault['msg']}" if place else str(fault["msg"])
    if fault["type"] == "missing":
        return message
    shown = json.dumps(fault["input"], default=repr)
    return f"{message}, not {shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + '...'}"


def _type_name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) and not _is_generic(kind) else str(kind)


def _is_generic(kind: object) -> bool:
    return bool(getattr(kind, "__args__", ()))


# The first match names a value: every integer is also a number.
_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list, tuple),
    "object": (Mapping,),
}


def check_arguments(
    tool: str, schema: Mapping[str, object], arguments: object
) -> dict[str, object]:
    """Check arguments against a schema, and return them as keyword arguments.

    An optional argument that is null counts as left out, and 3.0 counts as the integer 3.
    Checks `type`, `enum`, the four bounds of numbers, `minLength`, `properties`, `required`,
    `additionalProperties` and `items`; other keywords are ignored.

    Raises:
        InvalidOption: Arguments are wrong; the message lists all faults.
    """
    if not isinstance(arguments, Mapping):
        raise InvalidOption(
            f"{tool}: the arguments must be an object, not {_kind(arguments)}.",
            hint=f"It takes: {_names(schema)}.",
        )
    tidy = _tidy_object(schema, arguments)
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


def _argument_faults(name: str, schema: Mapping[str, object], value: object) -> Iterator[str]:
    expected = schema.get("type")
    kinds = [expected] if isinstance(expected, str) else list(cast("Sequence[str]", expected or ()))
    if kinds and not any(_is(kind, value) for kind in kinds):
        names = " or ".join(map(_kind_name, kinds))
        yield f"{name!r} must be {names}, not {_kind(value)}: {_shorten_value(value)}."
    elif "enum" in schema and value not in cast("Sequence[object]", schema["enum"]):
        choices = _shorten_value(schema["enum"])
        yield f"{name!r} must be one of {choices}, not {_shorten_value(value)}."
    elif isinstance(value, str):
        yield from _faults_of_text(name, schema, value)
    elif isinstance(value, (int, float)):
        yield from _faults_of_number(name, schema, value)
    elif isinstance(value, (list, tuple)) and isinstance(schema.get("items"), Mapping):
        for index, item in enumerate(value):
            yield from _argument_faults(
                f"{name}[{index}]", cast("Mapping[str, object]", schema["items"]), item
            )
    elif isinstance(value, Mapping):
        yield from _faults_of_object(name, schema, value)


def _faults_of_object(
    name: str, schema: Mapping[str, object], value: Mapping[str, object]
) -> Iterator[str]:
    known, prefix = _properties(schema), f"{name}." if name else ""
    closed = schema.get("additionalProperties") is False
    unknown = [key for key in value if closed and key not in known]
    near = {key: difflib.get_close_matches(key, known, n=1, cutoff=0.5) for key in unknown}
    for key, nearest in near.items():
        suggestion = f" Did you mean {nearest[0]!r}?" if nearest else ""
        yield f"there is no parameter {prefix + key!r}.{suggestion}"
    for key in _required(schema):
        if key not in value and [key] not in near.values():
            yield f"the parameter {prefix + key!r} is missing."
    for key in known:
        if key in value:
            yield from _argument_faults(prefix + key, known[key], value[key])


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
    # `not value > bound` instead of `value <= bound`: NaN must be refused.
    if "exclusiveMinimum" in bounds and not value > bounds["exclusiveMinimum"]:
        yield f"{name!r} must be more than {bounds['exclusiveMinimum']}, not {value}."
    if "exclusiveMaximum" in bounds and not value < bounds["exclusiveMaximum"]:
        yield f"{name!r} must be less than {bounds['exclusiveMaximum']}, not {value}."


def _is(kind: str, value: object) -> bool:
    # A bool is an int in Python, but not in JSON.
    return isinstance(value, _TYPES[kind]) and (kind == "boolean") == isinstance(value, bool)


def _kind_name(kind: str) -> str:
    if kind == "null":
        return kind
    return f"an {kind}" if kind[0] in "aio" else f"a {kind}"


def _kind(value: object) -> str:
    return next((_kind_name(kind) for kind in _TYPES if _is(kind, value)), type(value).__name__)


def _shorten_value(value: object) -> str:
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
