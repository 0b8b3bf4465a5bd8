"""Commands written in Python: plain, streaming and invalid ones."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import TYPE_CHECKING, cast

import pytest

from smokebox import virtual
from smokebox.errors import InvalidOption
from smokebox.sandbox.virtual.command import CommandCall, CommandOutput, CommandStream

if TYPE_CHECKING:
    from smokebox.sandbox.virtual.command import Command
    from smokebox.types import ExecResult


async def run_with(script: str, **commands: Command) -> ExecResult:
    async with virtual(commands=commands) as sandbox:
        return await sandbox.exec(script)


def greet(call: CommandCall) -> str:
    return f"hello {' '.join(call.args)}{call.stdin}\n"


async def count(call: CommandStream) -> int:
    size = 0
    async for data in call.stdin:
        size += len(data)
    await call.write(f"{size}\n")
    return 0


async def test_plain_command_gets_arguments_and_stdin() -> None:
    result = await run_with("greet a 'b c'; echo -n piped | greet", greet=greet)
    assert result.stdout == "hello a b c\nhello piped\n"


async def test_plain_command_sees_exported_variables_and_cwd() -> None:
    def where(call: CommandCall) -> str:
        return f"{call.name} {call.cwd} {call.env.get('A')} {call.env.get('B')} {call.path('x')}\n"

    result = await run_with("mkdir -p /d; cd /d; export A=1; B=2; where", where=where)
    assert result.stdout == "where /d 1 None /d/x\n"


async def test_command_sets_output_and_exit_code() -> None:
    def fail(call: CommandCall) -> CommandOutput:
        return CommandOutput(stdout="out\n", stderr="err\n", exit_code=3)

    result = await run_with("fail; echo $?", fail=fail)
    assert (result.stdout, result.stderr) == ("out\n3\n", "err\n")


async def test_files_written_by_a_command_are_visible_to_the_script() -> None:
    def create(call: CommandCall) -> str:
        call.files.write(call.path(call.args[0]), b"created\n")
        return ""

    assert (await run_with("create a/b.txt; cat a/b.txt", create=create)).stdout == "created\n"


async def test_plain_command_may_walk_the_files() -> None:
    def names(call: CommandCall) -> str:
        return "".join(f"{info.path}\n" for info in call.files.walk(call.path("d")))

    result = await run_with("mkdir -p d/e; touch d/f d/e/g; names", names=names)
    assert result.stdout.split() == ["/workspace/d/e", "/workspace/d/e/g", "/workspace/d/f"]


async def test_process_substitution_can_be_read() -> None:
    def show(call: CommandCall) -> str:
        return call.read_file(call.args[0]).decode()

    assert (await run_with("show <(echo inner)", show=show)).stdout == "inner\n"


async def test_streaming_command_sees_every_byte() -> None:
    async def double(call: CommandStream) -> None:
        async for data in call.stdin:
            await call.write(data + data)

    result = await run_with(r"printf '\xff\x01' | double | od -An -tx1", double=double)
    assert result.stdout.split() == ["ff", "01", "ff", "01"]


async def test_streaming_command_may_wait_and_is_stopped_by_a_timeout() -> None:
    stopped = threading.Event()

    async def wait(call: CommandStream) -> int:
        try:
            await asyncio.sleep(1000)
        finally:
            stopped.set()
        return 0

    assert (await run_with("timeout 0.2 wait_long; echo $?", wait_long=wait)).stdout == "124\n"
    assert stopped.wait(10)


async def test_exception_is_one_line_on_stderr() -> None:
    def plain(call: CommandCall) -> str:
        raise ValueError("it broke\nin two")

    async def streaming(call: CommandStream) -> int:
        raise KeyError

    result = await run_with("plain; echo $?; streaming; echo $?", plain=plain, streaming=streaming)
    assert result.stdout == "1\n1\n"
    assert result.stderr == "plain: it broke in two\nstreaming: KeyError\n"


async def test_missing_file_is_reported_as_a_shell_does() -> None:
    def show(call: CommandCall) -> str:
        return call.files.read(call.path("nothere")).decode()

    result = await run_with("cd /tmp; show", show=show)
    assert result.stderr == "show: /tmp/nothere: No such file or directory\n"


async def test_exit_from_argparse_is_an_exit_code() -> None:
    def quit(call: CommandCall) -> str:
        raise SystemExit(2)

    assert (await run_with("quit; echo $?", quit=quit)).stdout == "2\n"


async def test_invalid_result_is_reported_and_not_printed() -> None:
    def plain(call: CommandCall) -> str:
        return cast("str", b"bytes")

    async def streaming(call: CommandStream) -> int:
        return cast("int", "text")

    result = await run_with("plain; streaming", plain=plain, streaming=streaming)
    assert result.stdout == ""
    assert "returned bytes" in result.stderr and "returned str" in result.stderr


async def test_partials_and_objects_are_commands() -> None:
    class Shout:
        async def __call__(self, call: CommandStream) -> int:
            await call.write((await call.read()).upper())
            return 0

    def say(word: str, call: CommandCall) -> str:
        return f"{word}\n"

    result = await run_with("say | shout", say=functools.partial(say, "hi"), shout=Shout())
    assert result.stdout == "HI\n"


async def test_custom_command_replaces_the_builtin() -> None:
    result = await run_with("date", date=lambda call: "always\n")
    assert result.stdout == "always\n"


async def test_two_streaming_commands_in_a_pipeline_fail_instead_of_hanging() -> None:
    async def produce(call: CommandStream) -> int:
        await call.write(b"x" * 10)
        return 0

    async with virtual(commands={"produce": produce, "count": count}) as sandbox:
        result = await sandbox.exec("produce | count")
        assert result.exit_code == 0 or "one at a time" in result.stderr
        assert (await sandbox.exec("produce > f; count < f")).stdout == "10\n"


@pytest.mark.parametrize("name", ["if", "done", "cd", "exit", "a b", "", "-x", "a/b", "ü", 3])
def test_names_that_cannot_be_called_are_refused(name: str) -> None:
    with pytest.raises(InvalidOption, match=r"name|replaced"):
        virtual(commands={name: greet})


@pytest.mark.parametrize("commands", [["greet"], {"greet": "echo hi"}, {"greet": None}])
def test_commands_that_are_not_callable_are_refused(commands: object) -> None:
    with pytest.raises(InvalidOption):
        virtual(commands=cast("dict[str, Command]", commands))
