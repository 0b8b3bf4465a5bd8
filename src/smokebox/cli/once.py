"""`smokebox once`: a command in a sandbox that is made for it, and goes with it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from smokebox.cli.options import (
    Command,
    Cwd,
    Env,
    Image,
    Limits,
    Stdin,
    Tier,
    Timeout,
    User,
    settings_of,
)
from smokebox.cli.trailing import Trailing

if TYPE_CHECKING:
    from smokebox.client.client import Client


def once(
    command: Command,
    image: Image = None,
    limits: Limits = None,
    env: Env = None,
    cwd: Cwd = None,
    user: User = None,
    tier: Tier = None,
    timeout: Timeout = None,
    stdin: Stdin = False,
) -> int:
    """Run a command in a fresh sandbox, and destroy it.

    For example: smokebox once -- python3 -c 'print(6 * 7)'
    """
    from smokebox.cli.given import parse_command
    from smokebox.cli.remote.finding import fresh
    from smokebox.cli.remote.running import show
    from smokebox.cli.remote.talking import talk

    settings = settings_of(
        image=image, limits=limits, env=env, cwd=cwd, user=user, tier=tier, ephemeral=True
    )
    given = sys.stdin.buffer.read() if stdin else None

    async def work(client: Client) -> int:
        async with fresh(client, settings) as sandbox:
            return await show(
                sandbox.exec_stream(parse_command(command), timeout=timeout, stdin=given)
            )

    return talk(work)


once.command_class = Trailing  # type: ignore[attr-defined]
