"""How a structured result is handed in: as the answer itself, or by the tools made for it."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from smokebox.agents.finish import Finish, unavailable
from smokebox.agents.results import ALREADY, FINISH, GIVE_UP, REMINDER
from smokebox.agents.tools.tool import Tool, ToolResult, failure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from smokebox.agents.messages import ToolCall
    from smokebox.agents.model import Model
    from smokebox.agents.results import ResultSpec

T = TypeVar("T")


class HandIn(Generic[T]):
    """The result of one piece of work, once there is one. The first valid one counts.

    Where every model of the work holds its answers to a schema by itself the answer is the
    result; else `finish` and `give_up` are there for it.
    """

    def __init__(self, spec: ResultSpec[T], models: Sequence[Model]) -> None:
        self._spec = spec
        self.native = all(model.info.native_results for model in models)
        self.reminder = REMINDER
        self.done = False
        self.value: T | None = None
        self.dumped: object = None
        self.given_up: str | None = None

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """What a request asks the provider to hold the answer to."""
        return self._spec.schema if self.native else None

    def tools(self) -> list[Tool]:
        """What the model hands its result in by; none where the provider sees to it."""
        if self.native:
            return []
        functions: dict[str, Callable[..., Awaitable[ToolResult]]] = {
            FINISH: self._finish,
            GIVE_UP: self._give_up,
        }
        return [
            Tool(
                name=spec.name,
                description=spec.description,
                parameters=spec.parameters,
                function=functions[spec.name],
                durable=True,
            )
            for spec in self._spec.finish_tools()
        ]

    def read(self, text: str) -> bool:
        """Take an answer as the result, if the provider was asked for one; True if it is valid."""
        if not self.native:
            return False
        try:
            self._take(self._spec.validate(text))
        except ValueError as error:
            self.reminder = str(error)
            return False
        return True

    async def replay(self, call: ToolCall) -> None:
        """Take what a call handed in before the process was killed."""
        for tool in self.tools():
            if tool.name == call.name:
                with contextlib.suppress(ValueError):
                    await tool.run(json.loads(call.arguments))

    def finish(self, text: str, model: str) -> Finish | None:
        """The end, if there is a result; `ResultUnavailable` where the model gave up."""
        if self.given_up is not None:
            raise unavailable(self.given_up, text)
        if not self.done:
            return None
        return Finish(text=text, model=model, data=self.value, result=self.dumped)

    async def _finish(self, /, **result: Any) -> ToolResult:
        if self.done:
            return ToolResult(text=ALREADY)
        try:
            self._take(self._spec.validate(result))
        except ValueError as error:
            return failure(str(error))
        return ToolResult(text="Handed in.")

    async def _give_up(self, reason: str) -> ToolResult:
        if not self.done:
            self.given_up = reason
        return ToolResult(text="Noted.")

    def _take(self, value: T) -> None:
        self.value, self.dumped, self.done = value, self._spec.dump(value), True
