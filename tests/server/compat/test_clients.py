"""Unmodified third-party clients of the bridge protocol."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings
from smokebox.wire.requests import CreateKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.server.server import RunningServer
    from smokebox.testing import SeaweedServer

HERE = Path(__file__).parent
NODE = shutil.which("node")
NODE_MODULES = Path(sys.prefix) / "js" / "node_modules"


async def run(key: str, bucket: dict[str, str], *command: str | Path) -> None:
    """Run a program with a key and a bucket in its environment, and check that it succeeds."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "CLOUDFLARE_SANDBOX_API_KEY": key, "BUCKET": json.dumps(bucket)},
    )
    try:
        out, err = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, err.decode()
    assert (out, err) == (b"", b"")


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server that requires keys."""
    settings = ServerSettings(
        home=str(tmp_path / "home"),
        host="127.0.0.1",
        keys=True,
        pool=0,
        private_networks=("127.0.0.1",),
    )
    async with run_server(settings) as server:
        yield server
        assert await server.state.host.list() == [], "a client left a sandbox"


@pytest_asyncio.fixture
async def key(server: RunningServer) -> str:
    """A key of the server."""
    return (await server.state.keys.create(CreateKey(name="agents", prefix="team-"))).key


@pytest.fixture
def bucket(seaweed: SeaweedServer, bucket_name: str) -> dict[str, str]:
    """The location and credentials of a bucket."""
    return {
        "bucket": bucket_name,
        "endpoint": seaweed.endpoint,
        "access_key": seaweed.access_key,
        "secret_key": seaweed.secret_key,
    }


@pytest.mark.timeout(90)
async def test_openai_agents_sdk_for_python(
    server_url: str, key: str, bucket: dict[str, str]
) -> None:
    await run(
        key, bucket, sys.executable, "-W", "error", HERE / "python" / "scenarios.py", server_url
    )


@pytest.fixture
def scenarios(tmp_path: Path) -> Path:
    """The script for Node, in a directory with its packages."""
    if NODE is None or not NODE_MODULES.is_dir():
        pytest.skip("needs Node 20 or newer with npm, and what `make test` installs with it")
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    return Path(shutil.copy(HERE / "js" / "scenarios.mjs", tmp_path))


@pytest.mark.timeout(90)
async def test_openai_agents_sdk_for_javascript(
    server_url: str, key: str, scenarios: Path, bucket: dict[str, str]
) -> None:
    assert NODE is not None
    await run(key, bucket, NODE, scenarios, server_url)
