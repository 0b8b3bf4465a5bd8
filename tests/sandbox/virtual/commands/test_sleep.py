"""`sleep` waits, and stops on timeout or cancellation."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from smokebox import virtual

if TYPE_CHECKING:
    from sandbox.virtual.commands.gnu import Compare, Run

SCRIPTS = [
    "sleep 0.01 0.02; echo $?", "sleep x; echo $?", "sleep; echo $?", "sleep 0.0001m; echo $?",
    "sleep -1; echo $?", "sleep 1x; echo $?", "sleep .01; echo $?", "sleep 1e-2; echo $?",
    "timeout 0.1 sleep 9; echo $?",
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
async def test_sleep_matches_gnu(script: str, same_as_gnu: Compare) -> None:
    await same_as_gnu(script)


async def test_sleep_waits_for_the_sum_of_its_arguments(run: Run) -> None:
    started = time.monotonic()
    await run("sleep 0.1 0.1")
    assert time.monotonic() - started >= 0.2


async def test_timeout_ends_a_long_sleep() -> None:
    async with virtual() as sandbox:
        result = await sandbox.exec("echo before; sleep 1000; echo after", timeout=0.3)
    assert (result.exit_code, result.stdout) == (124, "before\n")


async def test_cancelling_an_infinite_sleep_keeps_the_shell_usable() -> None:
    async with virtual() as sandbox:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await sandbox.exec("sleep infinity")
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"
