"""Egress handlers of synchronous code, of several event loops, and of several threads."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from smokebox import Egress, sync
from smokebox.client.client import connect
from smokebox.egress import Request, Response

if TYPE_CHECKING:
    from client.server_process import ServerProcess

CURL = "curl -s -m 15 http://any.test/x"
_numbers = itertools.count(1)


def respond(request: Request, env: Any, context: Any) -> Response:
    return Response(f"response to {request.url}")


def test_handlers_work_without_await(server: ServerProcess) -> None:
    with sync.connect(server.url).create(egress=Egress(outbound=respond)) as sandbox:
        assert sandbox.exec(CURL).stdout == "response to http://any.test/x"
        sandbox.set_outbound_by_host("any.test", lambda *_: Response("another"))
        assert sandbox.exec(CURL).stdout == "another"
        assert sandbox.get_egress().decide("any.test").action == "handle"
        assert [one.host for one in sandbox.network_log()] == ["any.test", "any.test"]


def test_class_of_the_facade_has_handlers(server: ServerProcess) -> None:
    class Responding(sync.Sandbox):
        def outbound(request: Request, env: Any, context: Any) -> Response:  # type: ignore[misc]
            return Response("by the class")

    id = f"net-sync-{next(_numbers)}"
    sandbox = sync.connect(server.url).sandbox(Responding, id)
    assert sandbox.exec(CURL).stdout == "by the class"
    sandbox.destroy()


def test_channel_reopens_on_another_event_loop(server: ServerProcess) -> None:
    client = connect(server.url)
    sandbox = client.sandbox(f"net-loops-{next(_numbers)}", egress=Egress(outbound=respond))

    async def use() -> str:
        return (await sandbox.exec(CURL)).stdout

    for _ in range(2):
        assert asyncio.run(use()) == "response to http://any.test/x"
    asyncio.run(sandbox.destroy())


def test_handle_works_on_event_loops_of_other_threads(server: ServerProcess) -> None:
    client = connect(server.url)
    sandbox = client.sandbox(f"net-threads-{next(_numbers)}", egress=Egress(outbound=respond))

    async def use() -> str:
        return (await sandbox.exec(CURL)).stdout

    async def run() -> list[str]:
        # The channel opens on this loop, and the others use it.
        await sandbox.wake()
        calls = (asyncio.to_thread(asyncio.run, use()) for _ in range(3))
        outputs = await asyncio.gather(*calls)
        await sandbox.set_outbound(lambda *_: Response("another"))
        outputs.append(await asyncio.to_thread(asyncio.run, use()))
        await sandbox.destroy()
        return outputs

    assert asyncio.run(run()) == ["response to http://any.test/x"] * 3 + ["another"]
