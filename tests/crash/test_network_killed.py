"""SIGKILL of the engine of a sandbox that uses the network: the next engine serves its egress."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.egress.tcp_traffic import send_text, uppercase_server
from smokebox.engine.host import Host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.engine.sandbox import Sandbox

ENGINE = """
import asyncio, os, sys
from smokebox.egress.policy import Egress
from smokebox.engine.host import Host

async def main():
    home, layers, tier, port, client = sys.argv[1:]
    target = f"127.0.0.1:{port}"
    policy = Egress(tcp=["db.test:5432"], hosts={"db.test": target, "web.test": target},
                    allowed_hosts=["db.test", "web.test"])
    host = await Host.open(home, tier=tier, pool=0, images=layers)
    sandbox = await host.create("box", egress=policy)
    await sandbox.start_process(["python3", "-c", client])
    while not await sandbox.exists("/workspace/received"):
        await asyncio.sleep(0.01)
    os.write(1, sandbox.egress_proxy.authority.pem)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""
# Resolves the address once, and keeps using it.
CLIENT = """
import socket, time
address = socket.gethostbyname("db.test")
number = 0
while True:
    number += 1
    try:
        with socket.create_connection((address, 5432), 10) as sock:
            sock.sendall(b"word %d" % number)
            sock.shutdown(socket.SHUT_WR)
            received = sock.recv(100)
    except OSError:
        received = b""
    if received:
        with open("/workspace/received", "ab") as file:
            file.write(received + b"\\n")
    time.sleep(0.05)
"""


@contextlib.asynccontextmanager
async def adopted(tmp_path: Path, layers: Path, tier: str) -> AsyncIterator[tuple[Sandbox, bytes]]:
    """Adopt a sandbox whose engine was killed; yields it and its CA certificate before."""
    source = str(Path(__file__).parents[2] / "src")
    async with uppercase_server() as port:
        killed = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ENGINE, str(tmp_path / "home"), str(layers), tier),
            *(str(port), CLIENT),
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": source},
        )
        pem, _ = await asyncio.wait_for(killed.communicate(), 60)
        assert killed.returncode == -signal.SIGKILL
        async with await Host.open(tmp_path / "home", tier="namespaces", images=layers) as host:
            yield host.sandbox("box"), pem


@pytest.mark.timeout(90)
@pytest.mark.parametrize("tier", ["namespaces", pytest.param("gvisor", marks=pytest.mark.gvisor)])
async def test_adopted_sandbox_keeps_its_addresses_and_certificate(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, tier: str
) -> None:
    layers = tmp_path_factory.getbasetemp() / "crash-images"
    async with adopted(tmp_path, layers, tier) as (sandbox, pem):
        info = await sandbox.info()
        assert info is not None
        assert (info.status, info.generation) == ("active", 1)
        before = len((await sandbox.read_bytes("/workspace/received")).splitlines())
        async with asyncio.timeout(30):
            while len((await sandbox.read_bytes("/workspace/received")).splitlines()) < before + 3:
                await asyncio.sleep(0.02)
        assert await send_text(sandbox, "db.test", 5432, "new") == "NEW"
        assert sandbox.egress_proxy.authority.pem == pem
        cursors = [event.cursor for event in await sandbox.egress_proxy.audit_log.read()]
        assert cursors == sorted(set(cursors))
