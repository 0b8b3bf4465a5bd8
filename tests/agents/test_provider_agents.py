"""Tests of agents over real HTTP: tools in each API format, and faults of providers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from smokebox import virtual
from smokebox.agents import Durability, init
from smokebox.agents.messages import ToolReturns
from smokebox.agents.models import open_model
from smokebox.errors import ModelRefused, ModelUnavailable
from smokebox.testing import FakeModelServer, Turn, call, faults, last_returns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox import SandboxApi
    from smokebox.agents import Harness
    from smokebox.agents.model import ModelRequest
    from smokebox.testing.faults import Fault

# The first use of a provider imports it, which takes seconds on a busy machine.
pytestmark = pytest.mark.timeout(120)

SPECS = ["anthropic/claude-sonnet-4-6", "openai/gpt-5.2", "openrouter/moonshotai/kimi-k2.6"]


@contextlib.asynccontextmanager
async def provider_harness(
    spec: str, server: FakeModelServer, *, sandbox: SandboxApi | None = None, stall: float = 180
) -> AsyncIterator[Harness]:
    async with contextlib.aclosing(open_model(spec, server.config)) as model:
        assert model.info.images  # Imports the provider, so that it does not count as a stall.
        durability = Durability(retry_delay=0.001, stall=stall)
        async with init(
            model=model, sandbox=sandbox, persist=False, durability=durability
        ) as harness:
            yield harness


def tool_results(request: ModelRequest) -> str:
    return "\n".join(back.text for back in last_returns(request))


@pytest.mark.parametrize("spec", SPECS)
async def test_model_uses_the_six_tools(spec: str) -> None:
    async with (
        FakeModelServer(
            call("write", path="notes/a.txt", content="one\ntwo\nneedle\n"),
            call("read", path="notes/a.txt"),
            call("edit", path="notes/a.txt", old_text="two", new_text="2"),
            [call("glob", pattern="**/*.txt"), call("grep", pattern="needle")],
            call("bash", command="cat notes/a.txt | wc -l; echo oops >&2; exit 3"),
            lambda request: f"Done: {tool_results(request)}",
        ) as server,
        provider_harness(spec, server, sandbox=virtual()) as harness,
    ):
        session = await harness.session()
        reply = await session.prompt("Work.")
        assert await harness.fs.read_file("notes/a.txt") == "one\n2\nneedle\n"
    returned = [
        "\n".join(back.text for back in message.returns)
        for message in server.requests[-1].messages
        if isinstance(message, ToolReturns)
    ]
    assert len(returned) == 5
    assert "needle" in returned[1]
    assert "notes/a.txt" in returned[3]
    assert reply.text.startswith("Done:")
    assert "oops" in reply.text
    assert "3" in reply.text
    assert reply.usage.requests == 6


TEMPORARY: list[Fault | Turn] = [
    faults.rate_limited(retry_after=0),
    faults.overloaded(),
    faults.server_error(),
    faults.cut_off(),
    faults.ended_early(),
    faults.garbled(),
    faults.failed_midway(),
    faults.garbage(),
]
NAMES = ["429", "busy", "500", "cut", "ended", "garbled", "midway", "garbage"]


@pytest.mark.parametrize("spec", SPECS[:2])
@pytest.mark.parametrize("fault", TEMPORARY, ids=NAMES)
async def test_temporary_fault_is_retried(spec: str, fault: Fault | Turn) -> None:
    async with (
        FakeModelServer(fault, "An answer.") as server,
        provider_harness(spec, server) as harness,
    ):
        session = await harness.session()
        reply = await session.prompt("Work.")
    assert reply.text == "An answer."
    assert len(server.received) == 2


@pytest.mark.parametrize("spec", SPECS[:2])
async def test_stalled_model_is_retried(spec: str) -> None:
    async with (
        FakeModelServer(faults.stalled("Half"), then="An answer.") as server,
        provider_harness(spec, server, stall=1.0) as harness,
    ):
        session = await harness.session()
        assert (await session.prompt("Work.")).text == "An answer."


@pytest.mark.parametrize("spec", SPECS[:2])
async def test_permanent_fault_is_unavailable(spec: str) -> None:
    async with (
        FakeModelServer(then=faults.overloaded()) as server,
        provider_harness(spec, server) as harness,
    ):
        session = await harness.session()
        with pytest.raises(ModelUnavailable):
            await session.prompt("Work.")
    assert len(server.received) > 1


@pytest.mark.parametrize("spec", SPECS[:2])
async def test_refused_request_is_not_retried(spec: str) -> None:
    async with (
        FakeModelServer(then=faults.bad_request()) as server,
        provider_harness(spec, server) as harness,
    ):
        session = await harness.session()
        with pytest.raises(ModelRefused, match="temperature"):
            await session.prompt("Work.")
    assert len(server.received) == 1
