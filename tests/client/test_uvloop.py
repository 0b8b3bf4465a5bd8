"""The SDK on uvloop, whose transports are not those of asyncio."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import sys, uvloop
from smokebox.client.client import connect
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings

async def main():
    async with run_server(ServerSettings(home=sys.argv[1], pool=0)) as server:
        async with connect(f"unix:{server.socket}") as client:
            sandbox = client.sandbox("box")
            assert (await sandbox.exec("echo hello")).stdout == "hello\\n"
            assert [chunk.data async for chunk in sandbox.exec_stream("echo hello")] == ["hello\\n"]
            await sandbox.write_file("f", b"x" * 3_000_000)
            assert len(await sandbox.read_bytes("f")) == 3_000_000
            async with await sandbox.create_terminal(command=["echo", "hello"]) as terminal:
                assert b"".join([data async for data in terminal]) == b"hello\\r\\n"
            await sandbox.destroy()

uvloop.run(main())
"""


def test_sdk_works_on_uvloop(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path / "home")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stderr) == (0, "")
