"""Egress by the SDK: policies, handlers of this process, changes, and the network log."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from client.server_process import server_process
from client.upstream import HOST, Upstream, upstream
from smokebox import Egress, Sandbox
from smokebox.egress import Refused, Request, Response, bearer, chain, log
from smokebox.errors import Forbidden, InvalidOption
from smokebox.wire.responses import EgressInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from client.server_process import ServerProcess
    from smokebox.client.client import Client
    from smokebox.egress import HandlerContext

SECRET = "s3cret-token-of-the-tests"
SECONDS = 20.0
_numbers = itertools.count(1)


@pytest.fixture
async def upstream_server() -> AsyncIterator[Upstream]:
    async with upstream() as server:
        yield server


@pytest.fixture
async def make(client: Client, upstream_server: Upstream) -> AsyncIterator[Any]:
    """Return a factory of sandboxes that resolve `api.test` to the upstream server."""
    created: list[Sandbox] = []

    def handle(kind: type[Sandbox] = Sandbox, id: str = "", **fields: Any) -> Sandbox:
        egress = Egress(hosts={HOST: upstream_server.address}, **fields)
        sandbox = client.sandbox(kind, id or f"net-{next(_numbers)}", egress=egress)
        created.append(sandbox)
        return sandbox

    yield handle
    for sandbox in created:
        await sandbox.destroy()
        await sandbox.aclose()


async def curl(sandbox: Sandbox, path: str = "/", *options: str) -> str:
    """Run curl in the sandbox; return the body, and the status on the last line."""
    words = ["curl", "-s", "-m", "15", "-w", "\n%{http_code}", *options, f"http://{HOST}{path}"]
    return (await sandbox.exec(words)).stdout


async def until(condition: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


async def test_handler_adds_a_secret_that_the_sandbox_never_sees(
    make: Any, upstream_server: Upstream
) -> None:
    class GitHub(Sandbox):
        outbound_by_host: ClassVar = {HOST: bearer(SECRET)}

    sandbox = make(GitHub)
    output = await curl(sandbox, "/user", "-H", "authorization: Bearer placeholder")
    assert output.endswith("\n200")
    assert SECRET not in output
    ((method, path, headers),) = upstream_server.requests
    assert (method, path, headers["authorization"]) == ("GET", "/user", f"Bearer {SECRET}")
    found = await sandbox.exec(f"env | grep {SECRET}; cat /proc/*/environ | grep -a {SECRET}")
    assert found.stdout == ""


async def test_function_named_outbound_in_a_class_is_a_handler(make: Any) -> None:
    class Responding(Sandbox):
        async def outbound(request: Request, env: Any, context: HandlerContext) -> Response:  # type: ignore[misc]
            return Response(f"{context.sandbox_id} {context.rule}", 201)

    sandbox = make(Responding)
    assert await curl(sandbox) == f"{sandbox.id} outbound\n201"


async def test_handler_may_respond_refuse_fail_or_forward(
    make: Any, upstream_server: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    async def choose(request: Request, env: Any, context: HandlerContext) -> Request | Response:
        match request.url.rpartition("/")[2]:
            case "refuse":
                raise Refused("not on a monday")
            case "fail":
                raise KeyError(SECRET)
            case "forward":
                response = await context.forward(request)
                response.headers["x-seen"] = "yes"
                return response
            case "upper":
                response = await context.forward(request)
                return Response((await response.text()).upper(), response.status)
            case _:
                return request

    sandbox = make(outbound_by_host={HOST: choose})
    refused = await curl(sandbox, "/refuse")
    assert refused.endswith("403")
    assert "not on a monday" in refused
    failed = await curl(sandbox, "/fail")
    assert failed.endswith("502")
    assert SECRET not in failed
    assert [path for _, path, _ in upstream_server.requests] == []
    assert "x-seen: yes" in (await curl(sandbox, "/forward", "-i")).lower()
    assert "GET /UPPER 0" in await curl(sandbox, "/upper")
    assert (await curl(sandbox, "/plain")).startswith("GET /plain")


async def test_large_bodies_pass_through_a_handler_read_or_unread(
    make: Any, upstream_server: Upstream
) -> None:
    size = 8 << 20
    seen: list[int] = []

    async def read(request: Request, env: Any, context: HandlerContext) -> Request:
        if request.url.endswith("/read"):
            seen.append(len(await request.read()))
        return request

    sandbox = make(outbound_by_host={HOST: read})
    await sandbox.exec(f"head -c {size} /dev/zero > /tmp/big")
    for path in ("/read", "/pass"):
        output = await curl(sandbox, path, "-X", "PUT", "-T", "/tmp/big")
        assert output.startswith(f"PUT {path} {size}")
    assert seen == [size]
    got = await sandbox.exec(f"curl -s http://{HOST}/big/{size} | wc -c")
    assert got.stdout.strip() == str(size)


async def test_requests_are_handled_concurrently(make: Any) -> None:
    arrived = asyncio.Semaphore(0)
    count = 0

    async def meet(request: Request, env: Any, context: HandlerContext) -> Response:
        nonlocal count
        count += 1
        if count == 8:
            for _ in range(8):
                arrived.release()
        await arrived.acquire()
        return Response("met")

    sandbox = make(outbound=meet)
    script = f"for i in 1 2 3 4 5 6 7 8; do curl -s -m 15 http://{HOST}/ & done; wait"
    assert (await sandbox.exec(script)).stdout == "met" * 8


async def test_request_without_a_connected_client_is_refused_with_the_reason(
    make: Any, client: Client, upstream_server: Upstream
) -> None:
    sandbox = make(outbound_by_host={HOST: bearer(SECRET)})
    assert (await curl(sandbox)).endswith("200")
    await sandbox.aclose()
    other = client.sandbox(sandbox.id)
    output = ""
    async with asyncio.timeout(SECONDS):
        # The server notices the disconnection a moment later.
        while "none is connected" not in output:
            output = await curl(other)
    assert output.endswith("403")
    # The next call of the handle connects again.
    assert (await curl(sandbox)).endswith("200")


async def test_collected_handle_disconnects_its_handlers(make: Any, client: Client) -> None:
    id = make().id
    sandbox = client.sandbox(id, egress=Egress(outbound_by_host={HOST: bearer(SECRET)}))
    await sandbox.wake()
    other = client.sandbox(id)
    assert (await other._connection.request(EgressInfo, "GET", "/egress")).served == [HOST]
    del sandbox
    gc.collect()
    async with asyncio.timeout(SECONDS):
        while (await other._connection.request(EgressInfo, "GET", "/egress")).served:
            await asyncio.sleep(0.01)


async def test_latest_of_two_clients_handles_requests(make: Any) -> None:
    async def first(request: Request, env: Any, context: HandlerContext) -> Response:
        return Response("first")

    async def second(request: Request, env: Any, context: HandlerContext) -> Response:
        return Response("second")

    one = make(outbound=first)
    assert await curl(one) == "first\n200"
    two = make(id=one.id, outbound=second)
    assert await curl(two) == "second\n200"
    await two.aclose()
    async with asyncio.timeout(SECONDS):
        while await curl(one) != "first\n200":
            pass


async def test_handlers_can_be_changed_at_run_time(make: Any, upstream_server: Upstream) -> None:
    sandbox = make()
    assert (await curl(sandbox)).endswith("000")
    await sandbox.set_outbound_by_host(HOST, chain(log, bearer(SECRET)))
    assert (await curl(sandbox)).endswith("200")
    assert upstream_server.requests[-1][2]["authorization"] == f"Bearer {SECRET}"
    policy = await sandbox.get_egress()
    assert policy.decide(HOST).rule == f"outbound_by_host['{HOST}']"
    assert policy.outbound_by_host == {HOST: "@client"}

    async def respond(request: Request, env: Any, context: HandlerContext) -> Response:
        return Response("caught")

    await sandbox.set_outbound(respond)
    await sandbox.remove_outbound_by_host(HOST)
    assert await curl(sandbox) == "caught\n200"
    await sandbox.set_outbound(None)
    assert not (await curl(sandbox)).endswith("200")


async def test_hosts_and_internet_can_be_changed_at_run_time(make: Any) -> None:
    sandbox = make()
    await sandbox.allow_host(HOST)
    assert (await curl(sandbox)).endswith("200")
    await sandbox.deny_host(HOST)
    assert not (await curl(sandbox)).endswith("200")
    await sandbox.remove_denied_host(HOST)
    await sandbox.set_internet(True)
    assert (await curl(sandbox)).endswith("200")
    await sandbox.set_internet(False)
    assert not (await curl(sandbox)).endswith("200")
    await sandbox.allow_host(HOST)
    await sandbox.remove_allowed_host(HOST)
    assert (await sandbox.get_egress()).closed
    await sandbox.reset_egress()
    policy = await sandbox.get_egress()
    assert (policy.closed, policy.denied_hosts) == (True, [])


async def test_sending_settings_again_keeps_run_time_changes(make: Any) -> None:
    sandbox = make(allowed_hosts=["other.test"])
    await sandbox.allow_host(HOST)
    again = make(id=sandbox.id, allowed_hosts=["other.test"])
    assert (await curl(again)).endswith("200")
    await again.update(egress=Egress(denied_hosts=["evil.test"]))
    policy = await again.get_egress()
    assert (policy.opened_hosts, policy.denied_hosts) == ([HOST], ["evil.test"])


async def test_update_adds_and_removes_handlers(make: Any, upstream_server: Upstream) -> None:
    sandbox = make()
    await sandbox.wake()
    hosts = {HOST: upstream_server.address}
    await sandbox.update(egress=Egress(hosts=hosts, outbound_by_host={HOST: bearer(SECRET)}))
    assert (await curl(sandbox)).endswith("200")
    assert upstream_server.requests[-1][2]["authorization"] == f"Bearer {SECRET}"
    await sandbox.update(egress=Egress(hosts=hosts))
    assert not (await curl(sandbox)).endswith("200")


async def test_created_sandbox_has_its_handlers(client: Client, upstream_server: Upstream) -> None:
    hosts = {HOST: upstream_server.address}
    egress = Egress(hosts=hosts, outbound_by_host={HOST: bearer(SECRET)})
    async with await client.create(egress=egress) as sandbox:
        assert (await curl(sandbox)).endswith("200")
    assert upstream_server.requests[-1][2]["authorization"] == f"Bearer {SECRET}"


async def test_sandbox_created_after_a_destroy_has_the_handlers(make: Any) -> None:
    sandbox = make(outbound_by_host={HOST: bearer(SECRET)})
    assert (await curl(sandbox)).endswith("200")
    await sandbox.destroy()
    assert (await curl(sandbox)).endswith("200")


async def test_log_has_requests_with_their_outcomes(make: Any) -> None:
    sandbox = make(allowed_hosts=[HOST])
    await curl(sandbox, "/one?key=value")
    await sandbox.exec("curl -s -m 5 http://other.test/")
    events = await sandbox.network_log()
    allowed = next(one for one in events if one.host == HOST)
    assert (allowed.verdict, allowed.method, allowed.status) == ("forwarded", "GET", 200)
    assert allowed.path is not None
    assert allowed.path.startswith("/one")
    assert allowed.rule == f"allowed_hosts['{HOST}']"
    refused = next(one for one in events if one.host == "other.test")
    assert refused.verdict == "refused"
    assert "allowed_hosts" in refused.reason
    assert await sandbox.network_log(after=events[-1].cursor) == []
    assert await sandbox.network_log(limit=1) == events[:1]


async def test_log_can_be_followed(make: Any) -> None:
    sandbox = make(allowed_hosts=[HOST])
    await sandbox.wake()
    following = sandbox.follow_network_log(after=0)
    first = asyncio.ensure_future(anext(following))
    await curl(sandbox, "/followed")
    async with asyncio.timeout(SECONDS):
        event = await first
    assert (event.host, event.path) == (HOST, "/followed")
    await following.aclose()


async def test_channel_reconnects_after_the_server_was_killed(
    tmp_path: Path, upstream_server: Upstream
) -> None:
    # In a thread, as it runs an event loop to warm up.
    with contextlib.ExitStack() as stack:
        server = await asyncio.to_thread(
            stack.enter_context, server_process(str(tmp_path / "home"))
        )
        client = server.client()
        hosts = {HOST: upstream_server.address}
        sandbox = client.sandbox(
            "again", egress=Egress(hosts=hosts, outbound_by_host={HOST: bearer(SECRET)})
        )
        assert (await curl(sandbox)).endswith("200")
        await asyncio.to_thread(_restart, server)
        assert (await curl(sandbox)).endswith("200")
        await sandbox.destroy()
        await client.aclose()
        await asyncio.to_thread(stack.close)


def _restart(server: ServerProcess) -> None:
    server.kill()
    server.start()


async def test_closing_the_client_closes_its_handler_channels(
    server: ServerProcess, upstream_server: Upstream
) -> None:
    client = server.client()
    sandbox = client.sandbox(f"net-{next(_numbers)}", egress=Egress(outbound=bearer(SECRET)))
    await sandbox.wake()
    assert sandbox._connection.channel.connected
    await client.aclose()
    assert not sandbox._connection.channel.connected
    await until(lambda: sandbox._connection.channel._task is None)
    await sandbox.destroy()
    await client.aclose()


def test_policy_of_a_class_is_checked_when_it_is_defined() -> None:
    with pytest.raises(InvalidOption, match="is a URL"):

        class Wrong(Sandbox):
            egress = ("https://api.test/v1",)

    with pytest.raises(InvalidOption, match="two handlers"):

        class Twice(Sandbox):
            outbound_by_host: ClassVar = {"a.test": "m:a", "A.test.": "m:b"}

    class Parent(Sandbox):
        egress = Egress(denied_hosts=["*.test"])

    with pytest.raises(InvalidOption, match="never be used"):

        class Child(Parent):
            outbound_by_host: ClassVar = {"a.test": bearer(SECRET)}


def test_field_of_the_policy_as_attribute_of_a_class_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"Use egress=Egress\(denied_hosts=...\)"):

        class Old(Sandbox):
            denied_hosts = ("*.test",)


async def test_policy_of_the_caller_keeps_handlers_of_the_class(make: Any) -> None:
    class Responding(Sandbox):
        egress = Egress(internet=True)
        outbound_by_host: ClassVar = {
            HOST: lambda *_: Response("of the class"),
            "b.test": lambda *_: Response("of the class"),
        }

    sandbox = make(Responding, outbound_by_host={"b.test": lambda *_: Response("of the caller")})
    assert await curl(sandbox) == "of the class\n200"
    assert (await sandbox.exec("curl -s http://b.test/")).stdout == "of the caller"
    policy = await sandbox.get_egress()
    assert policy.internet is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"egress": {"alowed_hosts": []}}, "Did you mean 'allowed_hosts'"),
        ({"egress": {"internet": "yes"}}, "internet is True or False"),
        ({"egress": {"tcp": ["db.test:99999"]}}, "port from 1 to 65535"),
        ({"egress": {"outbound": bearer}}, "does not take"),
        ({"egress": "a.test"}, "egress is an Egress or a list of hosts"),
        ({"network": ["a.test"]}, r"Use egress=Egress\(allowed_hosts=...\)"),
        ({"allowed_hosts": ["a.test"]}, r"Use egress=Egress\(allowed_hosts=...\)"),
        ({"outbound": bearer(SECRET)}, r"Use egress=Egress\(outbound=...\)"),
    ],
)
def test_invalid_settings_are_refused_at_once(
    client: Client, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOption, match=message):
        client.sandbox("never", **settings)


async def test_invalid_change_is_refused_and_changes_nothing(make: Any) -> None:
    sandbox = make(denied_hosts=["*.example.com"])
    with pytest.raises(InvalidOption, match="is a URL"):
        await sandbox.allow_host("https://api.test")
    with pytest.raises(InvalidOption, match="stays closed"):
        await sandbox.allow_host("api.example.com")
    with pytest.raises(InvalidOption, match="does not take"):
        await sandbox.set_outbound_by_host(HOST, bearer)
    with pytest.raises(Forbidden, match="not among those that this server allows"):
        await sandbox.set_outbound("smokebox.nowhere:nothing")
    assert (await sandbox.get_egress()).closed


async def test_followed_log_ends_with_the_sandbox(client: Client) -> None:
    sandbox = await client.create()
    seen = asyncio.Event()

    async def follow() -> list[str]:
        found = []
        async for event in sandbox.follow_network_log(after=0):
            found.append(event.host)
            seen.set()
        return found

    async with asyncio.TaskGroup() as group:
        following = group.create_task(follow())
        await sandbox.exec("curl -s -m 10 http://nowhere.test/")
        await seen.wait()
        await sandbox.destroy()
    assert set(following.result()) == {"nowhere.test"}
