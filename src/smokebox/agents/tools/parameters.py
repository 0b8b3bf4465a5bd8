"""The parameters of a function as a JSON schema, with descriptions from its docstring."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
import typing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from smokebox.agents.schemas import JsonType
from smokebox.agents.tools.tool import ToolContext
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_SECTIONS = (
    "args|arguments|parameters|params|keyword args|keyword arguments|other parameters|returns?|"
    "yields?|raises?|warns?|warnings?|examples?|notes?|references|see also|todo|attributes"
)
_PARAMETERS = re.compile(r"(?i)(?:keyword )?(?:args|arguments|params|(?:other )?parameters)")
_GOOGLE = re.compile(rf"(?i)({_SECTIONS}):\s*")
_NUMPY = re.compile(rf"(?i)({_SECTIONS})\s*")
_REST = re.compile(r":(\w+)((?:\s+[^:\s]+)*)\s*:(?:\s+(.*))?")
_REST_PARAMETERS = {"param", "parameter", "arg", "argument", "key", "keyword"}
_GOOGLE_ITEM = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_NUMPY_ITEM = re.compile(r"\*{0,2}(\w+(?:\s*,\s*\w+)*)\s*(?::.*)?")


@dataclass(slots=True)
class Docstring:
    """Parsed docstring: the text before the sections, and the parameters, each on one line."""

    text: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def parse_docstring(docstring: str | None) -> Docstring:
    """Parse a docstring in Google, NumPy or reST style."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    starts = [n for n in range(len(lines)) if _starts_section(lines, n)]
    parsed = Docstring(text="\n".join(lines[: starts[0]] if starts else lines).strip())
    for start, end in itertools.pairwise([*starts, len(lines)]):
        _read_section(lines[start:end], parsed.parameters)
    return parsed


def _starts_section(lines: list[str], number: int) -> bool:
    line = lines[number]
    if _REST.fullmatch(line) or _GOOGLE.fullmatch(line):
        return True
    return bool(_NUMPY.fullmatch(line)) and _is_underline(lines, number + 1)


def _is_underline(lines: list[str], number: int) -> bool:
    return number < len(lines) and re.fullmatch(r"-{3,}\s*", lines[number]) is not None


def _read_section(lines: list[str], into: dict[str, str]) -> None:
    rest = _REST.fullmatch(lines[0])
    if rest:
        if rest[1] in _REST_PARAMETERS and rest[2].split():
            # `:param int count: Number of items.` has the type before the name.
            into[rest[2].split()[-1]] = _join([rest[3] or "", *lines[1:]])
        return
    if not _PARAMETERS.fullmatch(lines[0].strip().rstrip(":")):
        return
    numpy = _is_underline(lines, 1)
    _read_items(lines[2 if numpy else 1 :], _NUMPY_ITEM if numpy else _GOOGLE_ITEM, into)


def _read_items(lines: list[str], pattern: re.Pattern[str], into: dict[str, str]) -> None:
    indent = min((_indent(line) for line in lines if line.strip()), default=0)
    texts: dict[str, list[str]] = {}
    names: list[str] = []
    for line in lines:
        item = pattern.fullmatch(line.strip()) if _indent(line) == indent else None
        if item:
            names = re.split(r"\s*,\s*", item[1])
            texts.update((name, list(item.groups()[1:])) for name in names)
        else:
            for name in names:
                texts[name].append(line)
    into.update((name, _join(text)) for name, text in texts.items())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip()) if line.strip() else -1


def _join(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


_CONTEXT = "ctx"
_SUPPORTED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a function that the model passes.

    `fields` has the pydantic `Field` defaults. `context` is the name of the parameter that
    takes the `ToolContext`, if there is one.
    """

    schema: dict[str, object]
    types: Mapping[str, JsonType[object]]
    fields: Mapping[str, Any]
    context: str | None

    @classmethod
    def of(
        cls, tool: str, function: Callable[..., object], descriptions: Mapping[str, str]
    ) -> Parameters:
        """Inspect a function. Raises `InvalidOption` for parameters that a model cannot pass."""
        properties: dict[str, object] = {}
        definitions: dict[str, object] = {}
        required: list[str] = []
        types: dict[str, JsonType[object]] = {}
        fields: dict[str, Any] = {}
        context: str | None = None
        for parameter in inspect.signature(function).parameters.values():
            kind = _hint(tool, function, parameter)
            if kind is ToolContext:
                context = parameter.name
                continue
            field = _pydantic_field(parameter.default)
            if field is not None:
                kind = Annotated[kind, field]
                fields[parameter.name] = field
            json_type: JsonType[object] = JsonType.of(
                kind, f"the parameter {parameter.name!r} of {tool}"
            )
            types[parameter.name] = json_type
            schema = dict(json_type.schema)
            _merge(tool, definitions, schema.pop("$defs", {}))
            properties[parameter.name] = _describe(schema, parameter, descriptions)
            if field.is_required() if field is not None else parameter.default is parameter.empty:
                required.append(parameter.name)
        whole: dict[str, object] = {"type": "object", "properties": properties}
        whole |= {"required": required, "additionalProperties": False}
        return cls(whole | ({"$defs": definitions} if definitions else {}), types, fields, context)

    def read(self, tool: str, arguments: Mapping[str, object]) -> dict[str, object]:
        """Convert arguments to values for the function. Raises `InvalidOption` with all faults."""
        values: dict[str, object] = {}
        faults: list[str] = []
        for name, argument in arguments.items():
            try:
                values[name] = self.types[name].read(argument)
            except ValueError as error:
                faults += [f"{name}: {line}" for line in str(error).split("\n")]
        if faults:
            raise InvalidOption(f"{tool}: these arguments are wrong:\n" + "\n".join(faults))
        for name in self.fields.keys() - values.keys():
            values[name] = self.fields[name].get_default(call_default_factory=True)
        return values


def _hint(tool: str, function: Callable[..., object], parameter: inspect.Parameter) -> Any:
    name, hint = parameter.name, parameter.annotation
    if parameter.kind not in _SUPPORTED:
        raise InvalidOption(
            f"the tool {tool!r} has the parameter {str(parameter).split(':')[0]}, which a JSON "
            "schema cannot express.",
            hint="Name each parameter, and use a list or dict for a variable number.",
            option=name,
            value=tool,
        )
    if _is_context(name, hint):
        return ToolContext
    if hint is inspect.Parameter.empty:
        raise InvalidOption(
            f"the parameter {name!r} of the tool {tool!r} has no type hint.",
            hint=f"Add one, such as {name}: str. Pass a bound method, not the function.",
            option=name,
            value=tool,
        )
    try:
        return _resolved(function, hint)
    except NameError as error:
        raise InvalidOption(
            f"the type hint of the parameter {name!r} of the tool {tool!r} cannot be resolved: "
            f"{error}.",
            hint="Import the name outside of `if TYPE_CHECKING`, or define it at the module's top.",
            option=name,
            value=tool,
        ) from error


def _is_context(name: str, hint: object) -> bool:
    if hint is inspect.Parameter.empty:
        return name == _CONTEXT
    # A hint as a string may be a name that only the type checker imports.
    if isinstance(hint, str):
        return hint.rpartition(".")[2] == ToolContext.__name__
    return hint is ToolContext


def _resolved(function: Callable[..., object], hint: object) -> Any:
    plain = function.func if isinstance(function, functools.partial) else function
    plain = inspect.unwrap(plain)
    if not hasattr(plain, "__globals__"):
        plain = getattr(plain, "__func__", None) or type(plain).__call__
    found = getattr(plain, "__globals__", {})
    inner = dict(inspect.getclosurevars(plain).nonlocals) if inspect.isfunction(plain) else {}
    holder = type("Holder", (), {"__annotations__": {"hint": hint}})
    return typing.get_type_hints(holder, found, inner, include_extras=True)["hint"]


def _pydantic_field(default: object) -> Any | None:
    """Return the default if it is a pydantic `Field(...)`."""
    is_field = type(default).__name__ == "FieldInfo" and hasattr(default, "is_required")
    return default if is_field else None


def _describe(
    schema: dict[str, Any], parameter: inspect.Parameter, descriptions: Mapping[str, str]
) -> dict[str, Any]:
    if descriptions.get(parameter.name):
        schema.setdefault("description", descriptions[parameter.name])
    default = parameter.default
    if default is not parameter.empty and default is not None:
        # A default that has no JSON form is left out.
        with contextlib.suppress(TypeError):
            schema.setdefault("default", msgspec.to_builtins(default))
    return schema


def _merge(tool: str, into: dict[str, object], definitions: Mapping[str, object]) -> None:
    for name, definition in definitions.items():
        if into.setdefault(name, definition) != definition:
            raise InvalidOption(
                f"two recursive types of the tool {tool!r} have the name {name!r}.",
                hint="Rename one of them.",
                option=name,
                value=tool,
            )
