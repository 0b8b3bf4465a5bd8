"""Handlers from code that is not async, from several loops, and from several threads."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from smokebox import Egress, sync
from smokebox.client.client import connect
from smokebox.egress import Request, Response

if TYPE_CHECKING:
    from client.served import Served

ASK = "curl -s -m 15 http://any.test/x"
_numbers = itertools.count(1)


def answer(request: Request, env: Any, context: Any) -> Response:
    return Response(f"answered {request.url}")


def test_handlers_work_without_await(server: Served) -> None:
    with sync.connect(server.url).create(egress=Egress(outbound=answer)) as sandbox:
        assert sandbox.exec(ASK).stdout == "answered http://any.test/x"
        sandbox.set_outbound_by_host("any.test", lambda *_: Response("another"))
        assert sandbox.exec(ASK).stdout == "another"
        assert sandbox.get_egress().decide("any.test").action == "handle"
        assert [one.host for one in sandbox.network_log()] == ["any.test", "any.test"]


def test_a_class_of_the_facade_has_handlers_too(server: Served) -> None:
    class Answering(sync.Sandbox):
        def outbound(request: Request, env: Any, context: Any) -> Response:  # type: ignore[misc]
            return Response("by the class")

    id = f"net-sync-{next(_numbers)}"
    sandbox = sync.connect(server.url).sandbox(Answering, id)
    assert sandbox.exec(ASK).stdout == "by the class"
    sandbox.destroy()


def test_the_channel_follows_the_handle_to_another_loop(server: Served) -> None:
    client = connect(server.url)
    sandbox = client.sandbox(f"net-loops-{next(_numbers)}", egress=Egress(outbound=answer))

    async def use() -> str:
        return (await sandbox.exec(ASK)).stdout

    for _ in range(2):
        assert asyncio.run(use()) == "answered http://any.test/x"
    asyncio.run(sandbox.destroy())


def test_a_handle_serves_loops_of_other_threads(server: Served) -> None:
    client = connect(server.url)
    sandbox = client.sandbox(f"net-threads-{next(_numbers)}", egress=Egress(outbound=answer))

    async def use() -> str:
        return (await sandbox.exec(ASK)).stdout

    async def outlive() -> list[str]:
        # This loop has the channel; the others find it open.
        await sandbox.wake()
        elsewhere = (asyncio.to_thread(asyncio.run, use()) for _ in range(3))
        told = await asyncio.gather(*elsewhere)
        await sandbox.set_outbound(lambda *_: Response("another"))
        told.append(await asyncio.to_thread(asyncio.run, use()))
        await sandbox.destroy()
        return told

    assert asyncio.run(outlive()) == ["answered http://any.test/x"] * 3 + ["another"]
