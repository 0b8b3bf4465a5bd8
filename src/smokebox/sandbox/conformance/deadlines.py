"""Cases on timeouts and cancellation: no process outlives them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from smokebox.errors import InvalidOption
from smokebox.sandbox.conformance.cases import Cases

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import Capabilities

# Each command leaves a process that would write `survived` shortly after the kill.
STUBBORN = {
    "child": "(sleep 1.5; echo x > survived) & sleep 30",
    "grandchild": "bash -c '(sleep 1.5; echo x > survived) & sleep 30'",
    "own session": "setsid bash -c 'sleep 1.5; echo x > survived' & sleep 30",
    "daemon": "(setsid bash -c 'sleep 1.5; echo x > survived' &) ; sleep 30",
    "ignores TERM": "trap '' TERM; bash -c 'trap \"\" TERM; sleep 3; echo x > survived'; sleep 30",
    "nohup": "nohup bash -c 'sleep 1.5; echo x > survived' >/dev/null 2>&1 & sleep 30",
}
# Seconds after the kill until it would have been written.
PAUSE = {kind: 3.0 if kind == "ignores TERM" else 1.5 for kind in STUBBORN}


class DeadlineCases(Cases):
    """Nothing hangs, nothing survives, and partial output is kept."""

    async def test_timeout_is_124_and_keeps_partial_output(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("echo hi; echo oops >&2; sleep 30", timeout=0.5)
        assert (result.exit_code, result.stdout) == (124, "hi\n")
        assert result.stderr.startswith("oops\n")
        assert "timed out after 0.5" in result.stderr

    async def test_timeout_comes_in_time(self, sandbox: SandboxApi) -> None:
        began = time.monotonic()
        await sandbox.exec("sleep 60", timeout=0.3)
        assert time.monotonic() - began < 15

    async def test_a_busy_loop_times_out(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("echo on; while :; do :; done", timeout=0.5)
        assert (result.exit_code, result.stdout) == (124, "on\n")

    async def test_a_command_in_time_is_untouched(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("sleep 0.1; echo fine", timeout=30)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "fine\n", "")

    async def test_the_sandbox_works_on_after_a_timeout(
        self, sandbox: SandboxApi, place: str
    ) -> None:
        await sandbox.exec("echo kept > f; sleep 30", cwd=place, timeout=0.5)
        result = await sandbox.exec("cat f", cwd=place)
        assert result.stdout == "kept\n"

    @pytest.mark.parametrize("kind", STUBBORN)
    async def test_nothing_survives_a_timeout(
        self, sandbox: SandboxApi, place: str, kind: str
    ) -> None:
        result = await sandbox.exec(STUBBORN[kind], cwd=place, timeout=0.5)
        assert result.exit_code == 124
        await asyncio.sleep(PAUSE[kind])
        assert await sandbox.readdir(place) == []

    @pytest.mark.parametrize("kind", ["child", "own session", "ignores TERM"])
    async def test_nothing_survives_a_cancel(
        self, sandbox: SandboxApi, place: str, kind: str
    ) -> None:
        task = asyncio.create_task(sandbox.exec(STUBBORN[kind], cwd=place))
        await asyncio.sleep(0.5)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 5
        await asyncio.sleep(PAUSE[kind])
        assert await sandbox.readdir(place) == []

    async def test_the_sandbox_works_on_after_a_cancel(self, sandbox: SandboxApi) -> None:
        task = asyncio.create_task(sandbox.exec("while :; do :; done"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"

    async def test_cancelling_before_the_start_runs_nothing(
        self, sandbox: SandboxApi, place: str
    ) -> None:
        task = asyncio.create_task(sandbox.exec("touch ran", cwd=place))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.3)
        assert await sandbox.readdir(place) == []

    async def test_a_background_child_does_not_hold_the_call(
        self, sandbox: SandboxApi, able: Capabilities
    ) -> None:
        # Without processes, a background command runs to its end first.
        pause = "20" if able.processes else "0.5"
        began = time.monotonic()
        result = await sandbox.exec("sleep $PAUSE & echo done", env={"PAUSE": pause})
        assert (result.exit_code, result.stdout) == (0, "done\n")
        assert time.monotonic() - began < 15

    @pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True])
    async def test_an_impossible_timeout_is_refused(
        self, sandbox: SandboxApi, timeout: float
    ) -> None:
        with pytest.raises(InvalidOption):
            await sandbox.exec("true", timeout=timeout)

    async def test_aclose_is_safe_to_repeat(self, sandbox: SandboxApi) -> None:
        await sandbox.exec("true")
        await sandbox.aclose()
        await sandbox.aclose()
