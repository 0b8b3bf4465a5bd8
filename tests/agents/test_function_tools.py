"""Tests of tools found from functions: schema, arguments, return values and errors."""

from __future__ import annotations

import asyncio
import base64
import datetime
import enum
import functools
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
import pytest
from pydantic import Field

from smokebox import OutputChunk, virtual
from smokebox.agents.tools import (
    AbortSignal,
    Tool,
    ToolContext,
    ToolFile,
    ToolImage,
    ToolResult,
    as_tool,
    as_tools,
    tool,
)
from smokebox.errors import Aborted, Conflict, InvalidOption, PathNotFound, SandboxGone, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


class Place(pydantic.BaseModel):
    city: str
    country: str = "NO"


@dataclass
class Weather:
    degrees: float
    on: datetime.date


@tool
def forecast(
    place: Place,
    days: Annotated[int, Field(ge=1, le=9)] = 3,
    unit: Unit = Unit.CELSIUS,
    style: Literal["short", "long"] = "short",
    since: datetime.date | None = None,
) -> str:
    """Return the weather forecast.

    Only for places on land.

    Args:
        place: Where.
        days: For how many days,
            today included.
        unit (Unit): What degrees are in.

    Returns:
        A sentence.
    """
    return f"{place.city} {place.country} {days} {unit.name} {style} {since}"


def test_hints_and_docstring_become_the_schema() -> None:
    assert forecast.name == "forecast"
    assert forecast.description == "Return the weather forecast.\n\nOnly for places on land."
    parameters: Any = forecast.parameters
    properties = parameters["properties"]
    assert parameters["required"] == ["place"]
    assert parameters["additionalProperties"] is False
    assert properties["place"]["description"] == "Where."
    assert properties["place"]["properties"]["country"] == {"type": "string", "default": "NO"}
    assert properties["days"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 9,
        "default": 3,
        "description": "For how many days, today included.",
    }
    assert properties["unit"]["enum"] == ["celsius", "kelvin"]
    assert properties["unit"]["default"] == "celsius"
    assert properties["style"]["enum"] == ["short", "long"]


async def test_arguments_are_converted_to_the_hinted_types() -> None:
    given = {"place": {"city": "Bergen"}, "unit": "kelvin", "since": "2026-01-02", "days": 2.0}
    result = await forecast.run(given)
    assert result == ToolResult(text="Bergen NO 2 KELVIN short 2026-01-02")


def test_tool_can_be_called_as_the_function() -> None:
    assert forecast(Place(city="Oslo"), style="long") == "Oslo NO 3 CELSIUS long None"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "'place' is missing"),
        ({"place": {"city": "x"}, "dayz": 1}, "Did you mean 'days'?"),
        ({"place": {"city": "x"}, "days": 10}, "must be at most 9"),
        ({"place": {"city": "x"}, "since": "soon"}, "since: Input should be a valid date"),
        ({"place": {}}, "place.city"),
        ({"place": {"city": "x"}, "days": 10**40}, "days"),
    ],
)
async def test_wrong_argument_is_an_error_result(
    arguments: dict[str, object], expected: str
) -> None:
    result = await forecast.run(arguments)
    assert result.is_error
    assert expected in result.text


def google(a: int, b: str) -> None:
    """Do it.

    Args:
        a: First: a number.
        b (str, optional): Second.

            More of it.

    Raises:
        ValueError: never.
    """


def numpy_like(a: int, b: str) -> None:
    """Do it.

    Parameters
    ----------
    a : int
        First: a number.
    b : str, optional
        Second.

        More of it.

    Returns
    -------
    None
    """


def rest(a: int, b: str) -> None:
    """Do it.

    :param a: First:
        a number.
    :type a: int
    :param str b: Second. More of it.
    :returns: nothing
    """


@pytest.mark.parametrize("function", [google, numpy_like, rest])
def test_docstring_styles_are_parsed(function: Callable[..., None]) -> None:
    found: Any = as_tool(function)
    properties = found.parameters["properties"]
    descriptions = {name: value.get("description") for name, value in properties.items()}
    assert found.description == "Do it."
    assert descriptions == {"a": "First: a number.", "b": "Second. More of it."}


async def test_sync_function_runs_in_a_thread() -> None:
    @tool
    async def here() -> str:
        return threading.current_thread().name

    @tool
    def there() -> str:
        return threading.current_thread().name

    assert (await here.run({})).text == threading.current_thread().name
    assert (await there.run({})).text == "smokebox-tool"


async def test_context_is_injected_and_not_in_the_schema() -> None:
    @tool
    def who(ctx: ToolContext, greeting: str = "hi") -> str:
        return f"{greeting} {ctx.session} {ctx.call_id} {ctx.tool} {ctx.key} {ctx.env['A']}"

    given = ToolContext(session="s", call_id="c", key="k", env={"A": "1"})
    assert (await who.run({}, ctx=given)).text == "hi s c who k 1"
    assert list(who.parameters["properties"]) == ["greeting"]


async def test_context_needs_no_hint_and_can_have_another_name() -> None:
    @tool
    def plain(ctx) -> str:  # type: ignore[no-untyped-def]
        return str(ctx.tool)

    @tool
    def other(context: ToolContext) -> str:
        return context.tool

    assert [(await each.run({})).text for each in (plain, other)] == ["plain", "other"]


async def test_tool_uses_the_workspace() -> None:
    @tool
    async def note(text: str, ctx: ToolContext) -> str:
        """Write a note."""
        await ctx.fs.write_file("note.txt", text)
        return "kept"

    async with virtual() as sandbox:
        assert (await note.run({"text": "x"}, ctx=ToolContext(sandbox=sandbox))).text == "kept"
        assert await sandbox.read_file("note.txt") == "x"
    assert "needs a workspace" in (await note.run({"text": "x"})).text


async def test_output_is_emitted_while_the_tool_runs() -> None:
    @tool
    def slow(ctx: ToolContext) -> None:
        ctx.output("half")

    seen: list[OutputChunk] = []
    assert (await slow.run({}, on_output=seen.append)).text == "Done."
    assert seen == [OutputChunk("stdout", "half")]


async def test_log_records_name_the_call(caplog: pytest.LogCaptureFixture) -> None:
    @tool
    def talk(ctx: ToolContext) -> None:
        ctx.log.warning("careful")

    await talk.run({}, ctx=ToolContext(session="s", call_id="c"))
    [record] = [r for r in caplog.records if r.getMessage() == "careful"]
    assert (vars(record)["session"], vars(record)["tool"]) == ("s", "talk")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("words", "words"),
        ("", "(no output)"),
        (None, "Done."),
        ({"a": [1, True]}, '{"a":[1,true]}'),
        (7, "7"),
        ([], "[]"),
        (Place(city="Oslo"), '{"city":"Oslo","country":"NO"}'),
        ([Place(city="Oslo")], '[{"city":"Oslo","country":"NO"}]'),
        (Weather(1.5, datetime.date(2026, 1, 2)), '{"degrees":1.5,"on":"2026-01-02"}'),
        (ToolResult(text="x", is_error=True), "x"),
    ],
    ids=repr,
)
async def test_return_value_is_shown_as_json(value: object, text: str) -> None:
    def give() -> object:
        return value

    assert (await as_tool(give).run({})).text == text


@pytest.mark.parametrize(
    "value",
    [PNG, ToolImage(media_type="image/png", data=PNG), ToolFile(path="a/b.png", data=PNG)],
    ids=lambda value: type(value).__name__,
)
async def test_images_are_shown(value: object) -> None:
    def paint() -> object:
        return value

    result = await as_tool(paint).run({})
    assert result.images == (ToolImage(media_type="image/png", data=PNG),)
    assert "image/png" in result.text


async def test_list_can_mix_text_and_images() -> None:
    def paint() -> list[object]:
        return ["Before:", PNG, "After:", PNG]

    result = await as_tool(paint).run({})
    assert len(result.images) == 2
    assert result.text.startswith("Before:\n\nAn image")


async def test_files_are_written_to_the_workspace() -> None:
    def export() -> ToolFile:
        return ToolFile(path="out/data.csv", data="a,b\n")

    async with virtual() as sandbox:
        result = await as_tool(export).run({}, ctx=ToolContext(sandbox=sandbox))
        assert await sandbox.read_file("out/data.csv") == "a,b\n"
        assert result.text == f"Wrote {sandbox.cwd}/out/data.csv (text/csv, 4 bytes)."
    shown = await as_tool(export).run({})
    assert shown.text == "data.csv (text/csv, 4 bytes):\na,b\n"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"GIF9", "not a PNG"),
        (object(), "object is neither text"),
        (ToolImage(media_type="image/png", data=b"x" * 4_000_000), "more than the"),
        (ToolFile(path="x.bin", data=b"\xff\x00"), "no workspace to write it to"),
    ],
    ids=["bytes", "object", "large", "binary"],
)
async def test_unsupported_return_value_is_an_error_result(value: object, expected: str) -> None:
    def give() -> object:
        return value

    result = await as_tool(give).run({})
    assert result.is_error
    assert expected in result.text


async def test_long_text_is_truncated_and_kept() -> None:
    def long() -> str:
        return "é" * 60_000

    async with virtual() as sandbox:
        result = await as_tool(long).run({}, ctx=ToolContext(sandbox=sandbox))
        assert len(result.text.encode()) < 52_000
        assert "of 120000 bytes. The output is in /tmp/" in result.text
        path = result.text.rsplit(" in ", 1)[1].rstrip(".]")
        assert await sandbox.read_file(path) == long()
    assert "was not kept" in (await as_tool(long).run({})).text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("x"), "fail failed: KeyError: 'x'"),
        (StopIteration(), "fail failed: RuntimeError"),
        (SystemExit(3), "fail failed: SystemExit: 3"),
        (PathNotFound("/x", hint="Look."), "no such file or directory: /x. Look."),
        (TimeoutError(), "fail failed: TimeoutError"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_exception_is_an_error_result(
    error: BaseException, expected: str, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)

    def fail() -> None:
        raise error

    async def fail_later() -> None:
        raise error

    found = tool(name="fail")(fail_later if is_async else fail)
    result = await found.run({})
    assert result.is_error
    assert result.text.startswith(expected)


async def test_sandbox_gone_is_raised() -> None:
    @tool
    def fail() -> None:
        raise SandboxGone("gone")

    with pytest.raises(SandboxGone):
        await fail.run({})


async def test_timeout_cancels_a_coroutine_and_signals_a_thread() -> None:
    ended = threading.Event()

    @tool(timeout=0.05)
    async def hang() -> None:
        await asyncio.Event().wait()

    @tool(timeout=0.05)
    def block(ctx: ToolContext) -> None:
        if ctx.aborted.wait(10):
            ended.set()

    for each in (hang, block):
        result = await each.run({})
        assert (result.is_error, result.timed_out) == (True, True)
        assert "longer than 0.05 seconds" in result.text
    assert await asyncio.to_thread(ended.wait, 10)


async def test_timeout_error_of_the_function_is_not_the_timeout() -> None:
    @tool(timeout=10)
    async def inner() -> None:
        raise TimeoutError("of something else")

    result = await inner.run({})
    assert result.timed_out is False
    assert "of something else" in result.text


async def test_cancellation_signals_only_the_thread_of_the_call() -> None:
    started, ended = threading.Event(), threading.Event()

    @tool
    def block(ctx: ToolContext) -> None:
        started.set()
        if ctx.aborted.wait(10):
            ended.set()

    ctx = ToolContext()
    running = asyncio.create_task(block.run({}, ctx=ctx))
    assert await asyncio.to_thread(started.wait, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await asyncio.to_thread(ended.wait, 10)
    assert not ctx.aborted


def test_abort_signal_sets_its_children() -> None:
    parent = AbortSignal()
    early = parent.child()
    parent.set("enough")
    late = parent.child()
    assert (bool(early), bool(late), late.reason) == (True, True, "enough")
    with pytest.raises(Aborted, match="enough"):
        early.check()
    child_only = AbortSignal()
    child_only.child().set()
    child_only.check()
    assert not child_only


def test_decorator_options_apply() -> None:
    @tool(name="pay-now", description="Pay.", timeout=5, durable=True)
    def pay(ctx: ToolContext) -> str:
        return ctx.key

    assert (pay.name, pay.description, pay.timeout, pay.durable) == ("pay-now", "Pay.", 5, True)


def test_description_defaults_to_the_name() -> None:
    def send_mail() -> None: ...

    assert as_tool(send_mail).description == "Send mail."


async def test_methods_partials_and_callable_objects_are_tools() -> None:
    class Till:
        def add(self, price: float) -> str:
            """Add a price."""
            return f"{price}"

        async def __call__(self, price: float) -> str:
            """Ring it up."""
            return f"rang {price}"

    def both(a: int, b: int) -> int:
        """Add two."""
        return a + b

    assert (await as_tool(Till().add).run({"price": 1})).text == "1.0"
    assert (await as_tool(Till()).run({"price": 1})).text == "rang 1.0"
    assert (await as_tool(functools.partial(both, b=2)).run({"a": 1})).text == "3"


async def test_defaults_can_be_pydantic_fields() -> None:
    @tool
    def search(
        query: str = Field(description="What for."),
        limit: int = Field(5, ge=1),
        tags: list[str] = Field(default_factory=list),  # noqa: B008
    ) -> str:
        return f"{query} {limit} {tags}"

    assert search.parameters["required"] == ["query"]
    assert (await search.run({"query": "x"})).text == "x 5 []"
    assert "at least 1" in (await search.run({"query": "x", "limit": 0})).text


def stars(*args: int) -> None: ...
def keywords(**kwargs: int) -> None: ...
def positional(a: int, /) -> None: ...
def no_hint(a) -> None: ...  # type: ignore[no-untyped-def]
def unknown_hint(a: Path) -> None: ...
def anything(a: Any) -> None: ...
def called(a: Callable[[], int]) -> None: ...
async def generated(a: int):  # type: ignore[no-untyped-def]
    yield a


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (stars, r"the parameter \*args"),
        (keywords, r"the parameter \*\*kwargs"),
        (positional, "the parameter a, which"),
        (no_hint, "'a' of the tool 'no_hint' has no type hint"),
        (unknown_hint, "cannot be resolved: name 'Path'"),
        (anything, "its schema is empty"),
        (called, "cannot be resolved: name 'Callable'"),
        (generated, "is a generator"),
        (str, "is not a tool"),
        ("read", "is not a tool"),
        (lambda: None, "cannot be the name"),
    ],
)
def test_unsupported_function_is_refused(function: Any, expected: str) -> None:
    with pytest.raises(InvalidOption, match=expected):
        as_tool(function)


def test_invalid_timeout_is_refused() -> None:
    with pytest.raises(InvalidOption, match="timeout=0"):
        tool(timeout=0)(google)


def test_tools_with_the_same_name_conflict() -> None:
    with pytest.raises(Conflict, match="two tools have the name 'google'"):
        as_tools([google, tool(name="google")(rest)])
    assert [each.name for each in as_tools([google, rest])] == ["google", "rest"]


async def test_as_tool_returns_a_tool_unchanged() -> None:
    async def echo(word: str) -> str:
        return word

    plain = Tool(name="echo", description="", parameters={}, function=echo)
    assert as_tool(plain) is plain


def test_context_without_workspace_raises_unsupported() -> None:
    with pytest.raises(Unsupported, match="sandbox=None"):
        _ = ToolContext(tool="x").fs
