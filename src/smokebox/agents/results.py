"""Results: the reply to a prompt, and the structured data it can carry."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from smokebox.agents.messages import Usage
from smokebox.agents.schemas import JsonType, check_arguments, inline, wrapped
from smokebox.agents.tools.tool import Tool, ToolResult, failure
from smokebox.errors import InvalidOption, ResultUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.agents.messages import ToolCall
    from smokebox.agents.model import Model


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Generic[T]):
    """Reply of an agent. `str(reply)` is its text.

    `data` is the structured result if `result=` was passed, else None. `usage` includes tasks
    and summaries. `stopped` says why the work ended before the model was done: `budget: turns`
    (or `tokens`, `cost`, `seconds`), `length` for a truncated answer, `refused` for a model
    that refused to answer; else None.
    """

    text: str
    data: T
    model: str = ""
    usage: Usage = field(default_factory=Usage)
    stopped: str | None = None

    @property
    def cost(self) -> float | None:
        """US dollars, None where a price is unknown."""
        return self.usage.cost

    def __str__(self) -> str:
        return self.text


def unavailable(reason: str, text: str) -> ResultUnavailable:
    """Return the error of work that ended without its structured result."""
    return ResultUnavailable(
        f"there is no result: {reason}.",
        hint="The field `text` has the model's last answer.",
        reason=reason,
        text=text,
    )


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
    """Type of a structured result.

    `schema` always describes an object, because providers require one: any other type is
    wrapped in an object with the single property `result`.
    """

    def __init__(self, schema: Mapping[str, Any], shape: JsonType[T]) -> None:
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
        """Return the spec of a type or of a JSON schema.

        Args:
            kind: A pydantic model, dataclass, TypedDict, msgspec.Struct, or plain types such
                as int, list[str], Literal. With a JSON schema, results are decoded JSON.

        Raises:
            InvalidOption: No provider accepts the schema of the type.
        """
        if isinstance(kind, Mapping):
            by_schema = _BySchema(kind)
            return ResultSpec(by_schema.schema, by_schema)
        shape: JsonType[Any] = JsonType.of(kind, "result")
        return ResultSpec(shape.schema, shape)

    def validate(self, value: str | Mapping[str, Any]) -> T:
        """Parse a result from JSON text, or from the arguments of `finish`.

        Raises:
            ValueError: The result is wrong; the message tells the model how to fix it.
        """
        decoded = _decode(value) if isinstance(value, str) else value
        try:
            return self._shape.read(self._unwrap(decoded))
        except ValueError as error:
            raise ValueError(f"The result does not have the required form:\n{error}") from error

    def dump(self, value: T) -> object:
        """Convert a result to JSON values, for the event log."""
        return self._shape.dump(value)

    def restore(self, dumped: object) -> T:
        """Return the result that `dump` wrote, also of resumed work, where it is still wrapped."""
        try:
            return self._shape.read(dumped)
        except ValueError:
            if isinstance(dumped, dict) and set(dumped) == {_WRAPPER}:
                return self._shape.read(dumped[_WRAPPER])
            raise

    def _unwrap(self, value: object) -> object:
        if not self._wraps:
            return value
        if not isinstance(value, Mapping) or set(value) != {_WRAPPER}:
            raise ValueError(f"it must be an object with the one property {_WRAPPER!r}.")
        return value[_WRAPPER]


class _BySchema(JsonType[Any]):
    """Values of a JSON schema, checked as far as `check_arguments` does."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        if not schema.keys() & {"type", "anyOf", "oneOf", "enum", "const", "$ref"}:
            raise InvalidOption(
                f"result: {json.dumps(dict(schema), default=repr)[:80]} is not a JSON schema with "
                "a type.",
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


class ResultCollector(Generic[T]):
    """Collects the structured result of one work item. The first valid one counts.

    If every model of the work has native results, the answer is the result. Otherwise the
    model calls the tools `finish` or `give_up`.
    """

    def __init__(self, spec: ResultSpec[T], models: Sequence[Model]) -> None:
        self._spec = spec
        self.native = all(model.info.native_results for model in models)
        self.reminder = REMINDER
        self.done = False
        self.value: T | None = None
        self.given_up: str | None = None

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """Schema that the provider enforces on the answer, if it can."""
        return self._spec.schema if self.native else None

    def tools(self) -> list[Tool]:
        """Return the tools that take the result; none if the provider enforces the schema."""
        if self.native:
            return []
        return [
            Tool(
                name=FINISH,
                description="Hand in the result, which ends the work. Call it once, at the end.",
                parameters=self._spec.schema,
                function=self._finish,
                durable=True,
            ),
            Tool(
                name=GIVE_UP,
                description="End the work without a result, if it is certain that none exists.",
                parameters=_REASON,
                function=self._give_up,
                durable=True,
            ),
        ]

    def read(self, text: str) -> bool:
        """Read the result from an answer of a native model; return True if it is valid."""
        if not self.native:
            return False
        try:
            self.value, self.done = self._spec.validate(text), True
        except ValueError as error:
            self.reminder = str(error)
            return False
        return True

    async def replay(self, call: ToolCall) -> None:
        """Restore the result of a call that was recorded before the process was killed."""
        for tool in self.tools():
            if tool.name == call.name:
                with contextlib.suppress(ValueError):
                    await tool.run(json.loads(call.arguments))

    def finished(self, text: str) -> bool:
        """Return True if there is a result. Raises `ResultUnavailable` after `give_up`."""
        if self.given_up is not None:
            raise unavailable(self.given_up, text)
        return self.done

    async def _finish(self, /, **result: Any) -> ToolResult:
        if self.done:
            return ToolResult(text=ALREADY)
        try:
            self.value, self.done = self._spec.validate(result), True
        except ValueError as error:
            return failure(str(error))
        return ToolResult(text="Handed in.")

    async def _give_up(self, reason: str) -> ToolResult:
        if not self.done:
            self.given_up = reason
        return ToolResult(text="Noted.")
