"""Structured results: the type that an answer must have, for the model and for the caller."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Generic, TypeVar, overload

from smokebox.agents.model import ToolSpec
from smokebox.agents.schemas import inline, wrapped
from smokebox.agents.shapes import Shape
from smokebox.agents.tools.arguments import check_arguments
from smokebox.errors import InvalidOption

T = TypeVar("T")

FINISH = "finish"
GIVE_UP = "give_up"
REMINDER = (
    "You have not handed in a result. Call finish with the result, or give_up with the reason "
    "if you cannot get one."
)
ALREADY = "The result was already handed in: this call changed nothing."

_WRAPPER = "result"
_FENCE = re.compile(r"\s*```\w*\s*\n(.*?)\n?\s*```\s*", re.DOTALL)
_REASON = {
    "type": "object",
    "properties": {
        "reason": {"type": "string", "description": "Why there is no result.", "minLength": 1}
    },
    "required": ["reason"],
    "additionalProperties": False,
}


class ResultSpec(Generic[T]):
    """What a result must be. `schema` is always that of an object, which providers insist on:
    another type is held in its one property `result`."""

    def __init__(self, schema: Mapping[str, Any], shape: Shape[T]) -> None:
        self._shape = shape
        self._wraps = schema.get("type") != "object"
        self.schema = wrapped(schema, _WRAPPER) if self._wraps else dict(schema)

    @overload
    @classmethod
    def of(cls, kind: type[T]) -> ResultSpec[T]: ...

    @overload
    @classmethod
    def of(cls, kind: object) -> ResultSpec[Any]: ...

    @classmethod
    def of(cls, kind: object) -> ResultSpec[Any]:
        """The result of a type: a pydantic model, dataclass, TypedDict, msgspec.Struct, or
        plain types such as int, list[str], Literal. A JSON schema gives what JSON decodes to.

        Raises `InvalidOption` for a type whose schema no provider takes.
        """
        if isinstance(kind, Mapping):
            by_schema = _BySchema(kind)
            return ResultSpec(by_schema.schema, by_schema)
        shape: Shape[Any] = Shape.of(kind, "result")
        return ResultSpec(shape.schema, shape)

    def validate(self, value: str | Mapping[str, Any]) -> T:
        """The result in JSON text, or in arguments of `finish`.

        Raises `ValueError` with what a model needs to know to mend it.
        """
        decoded = _decode(value) if isinstance(value, str) else value
        try:
            return self._shape.read(self._unwrap(decoded))
        except ValueError as error:
            raise ValueError(f"The result does not have the required form:\n{error}") from error

    def dump(self, value: T) -> object:
        """A result as what JSON can hold, for the record."""
        return self._shape.dump(value)

    def restore(self, dumped: object) -> T:
        """The result that `dump` has put into the record."""
        return self._shape.read(dumped)

    def finish_tools(self) -> list[ToolSpec]:
        """The two tools that a model without schemas of its own ends its work with."""
        return [
            ToolSpec(
                FINISH,
                "Hand in the result, which ends the work. Call it once, when all is done.",
                self.schema,
            ),
            ToolSpec(
                GIVE_UP,
                "End the work without a result, when you are certain that there is none to get.",
                _REASON,
            ),
        ]

    def _unwrap(self, value: object) -> object:
        if not self._wraps:
            return value
        if not isinstance(value, Mapping) or set(value) != {_WRAPPER}:
            raise ValueError(f"it must be an object with the one property {_WRAPPER!r}.")
        return value[_WRAPPER]


class _BySchema(Shape[Any]):
    """What a JSON schema describes, as far as the checks of tools' arguments go."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        if not schema.keys() & {"type", "anyOf", "oneOf", "enum", "const", "$ref"}:
            raise InvalidOption(
                f"result: {json.dumps(dict(schema), default=repr)[:80]} is not a JSON schema that "
                "says what is wanted.",
                hint="Give it a 'type', or pass a type such as a pydantic model.",
                option="result",
            )
        self.schema = inline(schema)
        self._checked = wrapped(self.schema, _WRAPPER)

    def read(self, value: object) -> Any:
        try:
            return check_arguments("result", self._checked, {_WRAPPER: value})[_WRAPPER]
        except InvalidOption as error:
            raise ValueError(error.message) from error

    def dump(self, value: Any) -> object:
        return value


def _decode(text: str) -> object:
    fenced = _FENCE.fullmatch(text)
    try:
        return json.loads(fenced[1] if fenced else text)
    except ValueError as error:
        raise ValueError(f"The result is not JSON: {error}. Give nothing but JSON.") from error
