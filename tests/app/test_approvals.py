"""Tool calls that wait for approval: requested in the stream, decided by a request."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, cast

import pytest

from app.site import app_of, project, serve, serve_asgi
from smokebox.app import create_app

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from app.site import Event, Site

PUSHER = """
from smokebox import create_agent
from smokebox.agents.approval import Approval
from smokebox.testing import ScriptedModel, call, last_returns, last_text

def reply(request):
    if returns := last_returns(request):
        return f"output: {returns[0].text}"
    return call("bash", command="echo pushed")

agent = create_agent(model=ScriptedModel(then=reply), approval=Approval(ask=["bash"]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return project(tmp_path / "p", agents__pusher=PUSHER)


async def pending_call(site: Site) -> str:
    """Return the id of the call that waits for approval."""
    source = site.events("/agents/pusher/one")
    async with aclosing(cast("AsyncGenerator[Event, None]", source)) as events:
        async for one in events:
            if one.kind == "approval_requested":
                assert one.data["name"] == "bash"
                return str(one.data["call_id"])
    raise AssertionError("no approval was requested")


@pytest.mark.parametrize(
    ("body", "expected"),
    [({"allow": True}, "pushed"), ({"allow": False, "reason": "not today"}, "not today")],
)
async def test_call_is_approved_or_denied(folder: Path, body: object, expected: str) -> None:
    async with serve(folder) as site:
        id = (await site.send("pusher/one", "push")).body["submission_id"]
        call_id = await pending_call(site)
        assert (await site.post(f"/agents/pusher/one/approvals/{call_id}", body)).status == 200
        done = await site.outcome(id)
        assert expected in done["result"]["text"]
        late = await site.post(f"/agents/pusher/one/approvals/{call_id}", body)
        assert (late.status, late.code) == (404, "not_found")


async def test_decision_may_go_to_another_process(folder: Path) -> None:
    """Two apps on one folder: the decision need not go to the app that does the work."""
    async with serve(folder) as one:
        id = (await one.send("pusher/one", "push")).body["submission_id"]
        call_id = await pending_call(one)
        async with serve(folder) as two:
            path = f"/agents/pusher/one/approvals/{call_id}"
            assert (await two.post(path, {"allow": True})).status == 200
            assert "pushed" in (await two.outcome(id))["result"]["text"]


async def test_pending_approval_survives_a_restart(folder: Path) -> None:
    asgi = create_app(folder)
    async with serve_asgi(asgi) as site:
        id = (await site.send("pusher/one", "push")).body["submission_id"]
        call_id = await pending_call(site)
        await app_of(asgi).stop(grace=0)
    async with serve(folder) as site:
        path = f"/agents/pusher/one/approvals/{call_id}"
        assert (await site.post(path, {"allow": True})).status == 200
        assert "pushed" in (await site.outcome(id))["result"]["text"]


@pytest.mark.parametrize("body", [{}, {"allow": "yes"}, {"allow": True, "why": "x"}, []])
async def test_invalid_decision_is_refused(folder: Path, body: object) -> None:
    async with serve(folder) as site:
        found = await site.post("/agents/pusher/one/approvals/c1", body)
        assert (found.status, found.code) == (400, "invalid_option")
