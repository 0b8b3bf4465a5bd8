"""JSON schemas in the form that providers take: references written out, noise left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PREFIX = "#/$defs/"
# Values, not schemas: a key in them that looks like one of ours is somebody's data.
_VALUES = {"default", "enum", "const", "examples", "required", "type"}
_NAMED_SCHEMAS = {"properties", "patternProperties"}


def inline(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` with each definition where it is used, but for those that hold themselves."""
    definitions: Mapping[str, Any] = schema.get("$defs", {})
    recursive = {name for name in definitions if name in _reached(definitions, name)}
    body = {key: value for key, value in schema.items() if key != "$defs"}
    root = str(body.get("$ref", "")).removeprefix(_PREFIX)
    if root in recursive:
        # A provider looks for the type of the root, and does not follow a reference to it.
        body = {**definitions[root], **{k: v for k, v in body.items() if k != "$ref"}}
    written: dict[str, Any] = _write(body, definitions, recursive)
    kept = {name: _write(definitions[name], definitions, recursive) for name in sorted(recursive)}
    return {**written, "$defs": kept} if kept else written


def wrapped(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The schema of an object whose one property `name` has `schema`."""
    inner = {key: value for key, value in schema.items() if key != "$defs"}
    outer: dict[str, Any] = {
        "type": "object",
        "properties": {name: inner},
        "required": [name],
        "additionalProperties": False,
    }
    return {**outer, "$defs": schema["$defs"]} if "$defs" in schema else outer


def _write(node: Any, definitions: Mapping[str, Any], recursive: set[str]) -> Any:
    if isinstance(node, list):
        return [_write(item, definitions, recursive) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = str(node["$ref"]).removeprefix(_PREFIX)
        if name in recursive or name not in definitions:
            return {"$ref": node["$ref"]}
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return _write({**definitions[name], **beside}, definitions, recursive)
    written: dict[str, Any] = {}
    for key, value in node.items():
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            written[key] = {k: _write(v, definitions, recursive) for k, v in value.items()}
        elif key == "const":
            written["enum"] = [value]
        elif key == "oneOf":
            written["anyOf"] = _write(value, definitions, recursive)
        elif key in _VALUES:
            written[key] = value
        elif key not in ("title", "discriminator"):
            written[key] = _write(value, definitions, recursive)
    return written


def _reached(definitions: Mapping[str, Any], start: str) -> set[str]:
    """The definitions that one leads to."""
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
