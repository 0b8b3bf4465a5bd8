"""Argument lists, complete and bounded output, over a sandbox that only runs shell text."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.errors import InvalidOption
from smokebox.integrations.command import Command, run_command, run_truncated

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from integrations.sandboxes import MakeSandbox
    from smokebox import SandboxApi

LIMIT = 10_000_000


@pytest_asyncio.fixture
async def sandbox(make_sandbox: MakeSandbox, tmp_path: Path) -> AsyncIterator[SandboxApi]:
    sandbox = make_sandbox(tmp_path)
    yield sandbox
    await sandbox.aclose()


async def test_arguments_arrive_unchanged(sandbox: SandboxApi) -> None:
    arguments = ["", " ", "a b", "$HOME", "`id`", "'", '"', "\\", "\n", "*", "-n", "é😀", "\x01"]
    done = await run_command(
        sandbox, Command.of_arguments(["printf", "%s|", *arguments]), limit=LIMIT
    )
    assert done.stdout == "".join(f"{text}|" for text in arguments)


async def test_program_does_not_see_our_variables(sandbox: SandboxApi) -> None:
    command = Command.of_arguments(["env"], {"COLOUR": "blue"})
    done = await run_command(sandbox, command, limit=LIMIT)
    assert "COLOUR=blue\n" in done.stdout
    assert "SMOKEBOX" not in done.stdout


async def test_variables_may_have_any_name(sandbox: SandboxApi) -> None:
    env = {name: "mine" for name in ("i", "n", "name", "argv", "args", "x", "_x")}
    done = await run_command(sandbox, Command.of_arguments(["env"], env), limit=LIMIT)
    assert all(f"{name}=mine\n" in done.stdout for name in env)


async def test_thousand_arguments_arrive(sandbox: SandboxApi) -> None:
    command = Command.of_arguments(["printf", "%s,", *map(str, range(1000))])
    done = await run_command(sandbox, command, limit=LIMIT)
    assert done.stdout == "".join(f"{n}," for n in range(1000))


async def test_megabyte_of_arguments_arrives(sandbox: SandboxApi) -> None:
    command = Command.of_arguments(["printf", "%s", *["x" * 65_536] * 16])
    done = await run_command(sandbox, command, limit=LIMIT)
    assert done.stdout == "x" * 2**20


@pytest.mark.parametrize(
    ("program", "exit_code"), [("no-such-program", 127), ("/etc/passwd", 126), ("exit", 127)]
)
async def test_program_that_cannot_run_exits_as_in_bash(
    sandbox: SandboxApi, program: str, exit_code: int
) -> None:
    done = await run_command(sandbox, Command.of_arguments([program]), limit=LIMIT)
    assert done.exit_code == exit_code
    assert done.stderr


def test_empty_argument_list_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        Command.of_arguments([])


def test_nul_in_an_argument_is_an_error_before_anything_runs() -> None:
    with pytest.raises(InvalidOption):
        Command.of_arguments(["echo", "a\0b"])


async def test_output_over_the_limit_ends_the_command(sandbox: SandboxApi) -> None:
    command = Command(text="echo $$; exec yes", env={})
    done = await run_command(sandbox, command, limit=100_000)
    assert done.exceeded == "stdout"
    pid = done.stdout.splitlines()[0]
    async with asyncio.timeout(10):
        while (await sandbox.exec(f"kill -0 {pid}")).exit_code != 1:
            await asyncio.sleep(0.02)


async def test_limit_is_for_each_stream_in_bytes(sandbox: SandboxApi) -> None:
    command = Command(text="printf ééééé; printf ééééé >&2", env={})
    assert (await run_command(sandbox, command, limit=10)).exceeded is None
    assert (await run_command(sandbox, command, limit=9)).exceeded is not None


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 100, 100_000])
async def test_bounded_output_keeps_both_ends(sandbox: SandboxApi, size: int) -> None:
    text = "".join(chr(97 + n % 26) for n in range(size))
    await sandbox.write_file("text", text)
    result = await run_truncated(sandbox, "cat text", timeout=30, limit=10)
    if size <= 10:
        assert (result.output, result.truncated) == (text, False)
    else:
        assert (result.output[:5], result.output[-5:]) == (text[:5], text[-5:])
        assert f"[{size - 10} characters left out" in result.output
        assert result.truncated
