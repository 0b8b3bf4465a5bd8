"""Tests of running tools: arguments, results and errors."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from smokebox import OutputChunk
from smokebox.agents.tools import OnOutput, Tool, ToolResult, workspace_tools
from smokebox.errors import InvalidOption, MissingDependency, PathNotFound, SandboxGone

if TYPE_CHECKING:
    from agents.tools.workspace import Workspace

CITY: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def raising_tool(error: BaseException) -> Tool:
    async def weather(city: str) -> str:
        raise error

    return Tool(name="weather", description="Weather.", parameters=CITY, function=weather)


async def test_function_can_return_text() -> None:
    async def weather(city: str) -> str:
        return f"Rain in {city}."

    tool = Tool(name="weather", description="Weather.", parameters=CITY, function=weather)
    assert await tool.run({"city": "Bergen"}) == ToolResult(text="Rain in Bergen.")
    assert tool.schema == {"name": "weather", "description": "Weather.", "parameters": CITY}


async def test_wrong_argument_is_an_error_result() -> None:
    result = await raising_tool(AssertionError()).run({"citi": "Bergen"})
    assert result.is_error
    assert "Did you mean 'city'?" in result.text


async def test_error_result_has_the_hint() -> None:
    result = await raising_tool(PathNotFound("/x", hint="Look again.")).run({"city": "x"})
    assert result == ToolResult(text="no such file or directory: /x. Look again.", is_error=True)


@pytest.mark.parametrize(
    "error",
    [SandboxGone("gone"), MissingDependency("no"), ZeroDivisionError(), asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)
async def test_errors_that_a_model_cannot_fix_are_raised(error: BaseException) -> None:
    with pytest.raises(type(error)):
        await raising_tool(error).run({"city": "x"})


async def test_streaming_tool_gets_the_callback() -> None:
    async def count(on_output: OnOutput | None) -> str:
        assert on_output is not None
        on_output(OutputChunk("stdout", "1"))
        return "done"

    seen: list[OutputChunk] = []
    tool = Tool(name="count", description="", parameters={}, function=count, streams=True)
    await tool.run({}, on_output=seen.append)
    assert seen == [OutputChunk("stdout", "1")]


async def test_workspace_tools_have_strict_schemas(work: Workspace) -> None:
    assert list(work.tools) == ["read", "write", "edit", "bash", "grep", "glob"]
    for tool in work.tools.values():
        schema = json.loads(json.dumps(tool.schema))
        assert schema["parameters"]["additionalProperties"] is False
        assert schema["description"]
        assert all(p["description"] for p in schema["parameters"]["properties"].values())


async def test_invalid_timeouts_are_refused(work: Workspace) -> None:
    with pytest.raises(InvalidOption, match="default_timeout"):
        workspace_tools(work.sandbox, bash_timeout=10, max_bash_timeout=5)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("read", {}),
        ("write", {"content": "x"}),
        ("edit", {"old_text": "x", "new_text": "y"}),
        ("grep", {"pattern": "x"}),
        ("glob", {"pattern": "x"}),
    ],
)
@pytest.mark.parametrize("path", ["", "a\0b"])
async def test_invalid_path_is_an_error_result(
    work: Workspace, tool: str, arguments: dict[str, object], path: str
) -> None:
    assert "path" in await work.error(tool, **arguments, path=path)
