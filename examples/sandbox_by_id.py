"""A sandbox per user, found by its id in every request.

    python examples/sandbox_by_id.py

Uses the server on this machine, or starts one.
"""

from __future__ import annotations

import asyncio

from smokebox import Sandbox, get_sandbox


class Worker(Sandbox):
    """Settings of the sandboxes of this application."""

    limits = "basic"
    labels = {"app": "example"}  # noqa: RUF012
    sleep_after = "5m"


async def first_request(user: str) -> None:
    """Set up a project if it does not exist."""
    sandbox = get_sandbox(Worker, f"user-{user}")
    if not await sandbox.exists("/workspace/project"):
        await sandbox.write_file("/workspace/project/main.py", "print('hello,', input())\n")
    result = await sandbox.exec(["python3", "main.py"], cwd="/workspace/project", stdin="Ada\n")
    print(result.stdout, end="")


async def next_request(user: str) -> None:
    """Continue with the same files, in any process."""
    sandbox = get_sandbox(Worker, f"user-{user}")
    session = await sandbox.create_session()
    await session.exec("cd /workspace/project")
    async for chunk in session.exec_stream("ls; wc -l main.py"):
        print(chunk.data, end="")
    await sandbox.destroy()


async def main() -> None:
    """Handle two requests of one user."""
    await first_request("42")
    await next_request("42")


if __name__ == "__main__":
    asyncio.run(main())
