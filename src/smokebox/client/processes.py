"""The long-running processes of a sandbox: started, found, listed, ended, forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.client.handle import Handle, part, repeat_key
from smokebox.client.process import Process
from smokebox.options import check_command, check_env, check_timeout
from smokebox.types import ProcessInfo
from smokebox.wire import answers
from smokebox.wire.requests import Kill, StartProcess

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Processes(Handle):
    """Processes that run until they end, are killed, or the sandbox sleeps."""

    async def start_process(
        self,
        command: str | Sequence[str],
        *,
        process_id: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        limits: Mapping[str, object] | None = None,
        stdin: bool = False,
        timeout: float | None = None,
    ) -> Process:
        """Start a command that runs on by itself, until it ends, is killed, or all sleeps.

        `timeout` is how long it may live. Without `stdin` it reads /dev/null.
        """
        body = StartProcess(
            command=check_command(command),
            id=process_id,
            cwd=cwd,
            env=check_env(env) or None,
            user=user,
            limits=None if limits is None else dict(limits),
            stdin=stdin,
            timeout=check_timeout(timeout),
        )
        info = await self._ask(
            ProcessInfo, "POST", "/processes", body=body, timeout=None, repeat_key=repeat_key()
        )
        return Process(self, info)

    async def get_process(self, id: str) -> Process:
        """The process of that id. Raises `NotFound`."""
        path = f"/processes/{part('process', id)}"
        return Process(self, await self._ask(ProcessInfo, "GET", path))

    async def list_processes(self) -> list[Process]:
        """All that run, and those kept of the ended, in the order of their start."""
        found = await self._ask(answers.Processes, "GET", "/processes")
        return [Process(self, info) for info in found.processes]

    async def kill_process(
        self, process: Process | str, signal: str | int | None = None, *, grace: float | None = None
    ) -> None:
        """End a process, or send it a signal, as its handle does."""
        id = process.id if isinstance(process, Process) else process
        path = f"/processes/{part('process', id)}/kill"
        body = Kill(signal=signal, grace=grace)
        await self._ask(type(None), "POST", path, body=body, timeout=None)

    async def kill_all_processes(
        self, signal: str | int | None = None, *, grace: float | None = None
    ) -> int:
        """End all processes, or send all a signal; how many there were to end."""
        body = Kill(signal=signal, grace=grace)
        ended = await self._ask(answers.Count, "POST", "/processes/kill", body=body, timeout=None)
        return ended.count

    async def cleanup_processes(self) -> int:
        """Forget the processes that have ended, with their logs; how many."""
        return (await self._ask(answers.Count, "DELETE", "/processes")).count
