"""A sandbox that an application finds again by its user's id: files stay, processes are ended.

    python examples/sandbox_by_id.py

The server behind it is found on this machine, or started.
"""

from __future__ import annotations

import asyncio

from smokebox import Sandbox, get_sandbox


class Worker(Sandbox):
    """How the sandboxes of this application are."""

    limits = "basic"
    labels = {"app": "example"}  # noqa: RUF012
    sleep_after = "5m"


async def first_request(user: str) -> None:
    """Set up a project, once."""
    sandbox = get_sandbox(Worker, f"user-{user}")
    if not await sandbox.exists("/workspace/project"):
        await sandbox.write_file("/workspace/project/main.py", "print('hello,', input())\n")
    result = await sandbox.exec(["python3", "main.py"], cwd="/workspace/project", stdin="Ada\n")
    print(result.stdout, end="")


async def next_request(user: str) -> None:
    """Go on where the user was, in whichever process this is."""
    sandbox = get_sandbox(Worker, f"user-{user}")
    session = await sandbox.create_session()
    await session.exec("cd /workspace/project")
    async for chunk in session.exec_stream("ls; wc -l main.py"):
        print(chunk.data, end="")
    await sandbox.destroy()


async def main() -> None:
    """Two requests of one user."""
    await first_request("42")
    await next_request("42")


if __name__ == "__main__":
    asyncio.run(main())
