"""The parameters of a function as a JSON schema, described by its docstring."""

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
    """What a docstring says, each text on one line but for the paragraphs of the first."""

    text: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def parse_docstring(docstring: str | None) -> Docstring:
    """The text before the first section, and the parameters in whichever form they are."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    ends = [n for n in range(len(lines)) if _begins_section(lines, n)]
    found = Docstring(text="\n".join(lines[: ends[0]] if ends else lines).strip())
    for start, end in itertools.pairwise([*ends, len(lines)]):
        _read_section(lines[start:end], found.parameters)
    return found


def _begins_section(lines: list[str], number: int) -> bool:
    line = lines[number]
    rest = _REST.fullmatch(line)
    if rest or _GOOGLE.fullmatch(line):
        return True
    return bool(_NUMPY.fullmatch(line)) and _is_underline(lines, number + 1)


def _is_underline(lines: list[str], number: int) -> bool:
    return number < len(lines) and re.fullmatch(r"-{3,}\s*", lines[number]) is not None


def _read_section(lines: list[str], into: dict[str, str]) -> None:
    rest = _REST.fullmatch(lines[0])
    if rest:
        if rest[1] in _REST_PARAMETERS and rest[2].split():
            # `:param int count: How many.` has the type before the name.
            into[rest[2].split()[-1]] = _joined([rest[3] or "", *lines[1:]])
        return
    if not _PARAMETERS.fullmatch(lines[0].strip().rstrip(":")):
        return
    numpy = _is_underline(lines, 1)
    _read_items(lines[2 if numpy else 1 :], _NUMPY_ITEM if numpy else _GOOGLE_ITEM, into)


def _read_items(lines: list[str], form: re.Pattern[str], into: dict[str, str]) -> None:
    indent = min((_indent(line) for line in lines if line.strip()), default=0)
    said: dict[str, list[str]] = {}
    names: list[str] = []
    for line in lines:
        item = form.fullmatch(line.strip()) if _indent(line) == indent else None
        if item:
            names = re.split(r"\s*,\s*", item[1])
            said.update((name, list(item.groups()[1:])) for name in names)
        else:
            for name in names:
                said[name].append(line)
    into.update((name, _joined(words)) for name, words in said.items())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip()) if line.strip() else -1


def _joined(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


_CONTEXT = "ctx"
_SUPPORTED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a function takes from the model, and as what it takes its `ToolContext`, if it does."""

    schema: dict[str, object]
    shapes: Mapping[str, JsonType[object]]
    fields: Mapping[str, Any]
    context: str | None

    @classmethod
    def of(cls, tool: str, function: Callable[..., object], said: Mapping[str, str]) -> Parameters:
        """Look at a function. Raises `InvalidOption` for what cannot be told to a model."""
        properties: dict[str, object] = {}
        definitions: dict[str, object] = {}
        required: list[str] = []
        shapes: dict[str, JsonType[object]] = {}
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
            shape: JsonType[object] = JsonType.of(
                kind, f"the parameter {parameter.name!r} of {tool}"
            )
            shapes[parameter.name] = shape
            schema = dict(shape.schema)
            _merge(tool, definitions, schema.pop("$defs", {}))
            properties[parameter.name] = _described(schema, parameter, said)
            if _is_required(parameter, field):
                required.append(parameter.name)
        whole: dict[str, object] = {"type": "object", "properties": properties}
        whole |= {"required": required, "additionalProperties": False}
        return cls(whole | ({"$defs": definitions} if definitions else {}), shapes, fields, context)

    def read(self, tool: str, arguments: Mapping[str, object]) -> dict[str, object]:
        """The values for the function. Raises `InvalidOption` with all faults."""
        values: dict[str, object] = {}
        faults: list[str] = []
        for name, argument in arguments.items():
            try:
                values[name] = self.shapes[name].read(argument)
            except ValueError as error:
                faults += [f"{name}: {line}" for line in str(error).split("\n")]
        if faults:
            said = "\n".join(faults)
            raise InvalidOption(f"{tool}: these arguments are not what it takes:\n{said}")
        left_out = self.fields.keys() - values.keys()
        values |= {
            name: self.fields[name].get_default(call_default_factory=True) for name in left_out
        }
        return values


def _hint(tool: str, function: Callable[..., object], parameter: inspect.Parameter) -> Any:
    name, hint = parameter.name, parameter.annotation
    if parameter.kind not in _SUPPORTED:
        raise InvalidOption(
            f"the tool {tool!r} takes {str(parameter).split(':')[0]}, which no schema can say.",
            hint="Name each parameter, and take lists or dicts where there may be many.",
            option=name,
            value=tool,
        )
    if _is_context(name, hint):
        return ToolContext
    if hint is inspect.Parameter.empty:
        raise InvalidOption(
            f"the parameter {name!r} of the tool {tool!r} has no type hint.",
            hint=f"Write one, such as {name}: str. A method is a tool once it is bound.",
            option=name,
            value=tool,
        )
    try:
        return _resolved(function, hint)
    except NameError as error:
        raise InvalidOption(
            f"the hint of the parameter {name!r} of the tool {tool!r} cannot be read: {error}.",
            hint="Import the name outside of `if TYPE_CHECKING`, or define it at the module's top.",
            option=name,
            value=tool,
        ) from error


def _is_context(name: str, hint: object) -> bool:
    if hint is inspect.Parameter.empty:
        return name == _CONTEXT
    # As text it may be a name that only the type checker imports.
    said = hint.rpartition(".")[2] if isinstance(hint, str) else hint
    return said == ToolContext.__name__ or said is ToolContext


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
    """What `= Field(...)` says, where a function is written as pydantic users write it."""
    is_field = type(default).__name__ == "FieldInfo" and hasattr(default, "is_required")
    return default if is_field else None


def _is_required(parameter: inspect.Parameter, field: Any | None) -> bool:
    if field is not None:
        return bool(field.is_required())
    return parameter.default is inspect.Parameter.empty


def _described(
    schema: dict[str, Any], parameter: inspect.Parameter, said: Mapping[str, str]
) -> dict[str, Any]:
    described = dict(schema)
    if said.get(parameter.name):
        described.setdefault("description", said[parameter.name])
    default = parameter.default
    if default is not inspect.Parameter.empty and default is not None:
        # Where only Python can say what it is, the model sees that it may be left out.
        with contextlib.suppress(TypeError):
            described.setdefault("default", msgspec.to_builtins(default))
    return described


def _merge(tool: str, into: dict[str, object], definitions: Mapping[str, object]) -> None:
    for name, definition in definitions.items():
        if into.setdefault(name, definition) != definition:
            raise InvalidOption(
                f"two types of the tool {tool!r} are both called {name!r} and hold themselves.",
                hint="Rename one of them.",
                option=name,
                value=tool,
            )
