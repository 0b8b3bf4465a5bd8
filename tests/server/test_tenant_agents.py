"""Agents in a sandbox of a tenant's key: approvals, subagents, sleep and ceilings together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest
import pytest_asyncio

from agents.scripted_session import scripted_session, wait_until
from http_response import fetch
from smokebox import connect, create_agent
from smokebox.agents.approval import Approval
from smokebox.errors import Forbidden, LimitReached
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.tenancy.profile import parse_profile
from smokebox.testing import ScriptedModel, call

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox import Client


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    profile = parse_profile("test", "default", {"sandboxes": 1, "lifetime": 3600})
    settings = ServerSettings(
        home=str(tmp_path / "home"),
        host="127.0.0.1",
        keys=True,
        pool=0,
        profiles={"default": profile},
    )
    async with run_server(settings) as server:
        yield server


@pytest_asyncio.fixture
async def tenant(server: RunningServer) -> AsyncIterator[Client]:
    """A client with a tenant's key."""
    connector = aiohttp.UnixConnector(server.socket)
    async with aiohttp.ClientSession("http://localhost", connector=connector) as operator:
        body = {"name": "acme", "prefix": "acme-"}
        key = (await fetch(operator.post("/api/keys", json=body))).body["key"]
    async with connect(server.url, key) as client:
        yield client


async def test_approved_command_and_subagent_work_in_the_sandbox_of_the_tenant(
    server: RunningServer, tenant: Client
) -> None:
    helper = create_agent(
        name="helper", description="Writes files.", approval=Approval(allow=["*"])
    )
    model = ScriptedModel(
        call("bash", command="echo approved >>file"),
        call("task", prompt="write it", agent="helper"),
        call("bash", command="echo from-helper >>file; cat file"),
        "written",
        "done",
    )
    sandbox = tenant.sandbox("acme-agent")
    await sandbox.write_file("file", "from-parent\n")
    async with scripted_session(
        model=model, sandbox=sandbox, subagents=[helper], approval=Approval(ask=["bash"])
    ) as session:
        work = session.prompt("go")
        await wait_until(lambda: session.approvals)
        # It may take an hour until a person decides.
        await server.state.host.sandbox("acme-agent").sleep()
        await session.approve(session.approvals[0].call_id)
        assert (await work).text == "done"
    assert await sandbox.read_file("file") == "from-parent\napproved\nfrom-helper\n"
    info = await sandbox.info()
    assert info is not None
    assert info.generation == 2
    assert info.expires_at == info.created_at + 3600
    assert [one.id for one in await tenant.list()] == ["acme-agent"]


async def test_agent_above_a_ceiling_is_told_which(tenant: Client) -> None:
    await tenant.sandbox("acme-first").wake()
    with pytest.raises(LimitReached) as caught:
        async with scripted_session("x", sandbox=tenant.sandbox("acme-second")):
            pytest.fail("it was opened")
    assert "`sandboxes` in [profiles.default]" in caught.value.hint
    with pytest.raises(Forbidden, match="begins with 'acme-'"):
        async with scripted_session("x", sandbox=tenant.sandbox("other-first")):
            pytest.fail("it was opened")
