"""Images of tenants: what counts against the quota of a key, and which digests it may start."""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import json
import os
import random
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from http_response import fetch
from oci_images import TestImage, tar
from registry_server import RegistryServer, run_registry
from server.key_client import client
from smokebox.engine.disk import measure
from smokebox.engine.images.registry.access import RegistryConfig, RegistrySettings
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.tenancy.profile import Profile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    import aiohttp

MIB = 1 << 20
CEILING = 4 * MIB
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """A registry without authorization."""
    with run_registry(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest_asyncio.fixture
async def server(tmp_path: Path, registry: RegistryServer) -> AsyncIterator[RunningServer]:
    """A server whose keys may store 4 MiB of images."""
    config = RegistryConfig(plain_http=True)
    settings = ServerSettings(
        home=str(tmp_path / "home"),
        host="127.0.0.1",
        keys=True,
        pool=0,
        private_networks=("127.0.0.0/8",),
        registries=RegistrySettings(registries={registry.authority: config}),
        profiles={
            "default": Profile(total_images=CEILING),
            "narrow": Profile(name="narrow", images=("host", f"{registry.authority}/allowed/*")),
            "wide": Profile(name="wide"),
        },
    )
    async with run_server(settings) as server:
        yield server


def push(registry: RegistryServer, *layers: bytes, team: str = "team") -> str:
    """Push an image of these layers, and return its reference."""
    repository = f"{team}/image-{next(_numbers)}"
    TestImage(layers=layers).push(registry.url, repository, "1")
    return f"{registry.authority}/{repository}:1"


def data(size: int, name: str = "data") -> bytes:
    """Return a layer with a file of random bytes."""
    return tar({name: random.Random(next(_numbers)).randbytes(size)})


async def events(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
    """Send a request with a stream of events as its response, and return the last event."""
    async with session.post(path, json=body) as response:
        text = await response.text()
    if not text.startswith(("event", ":")):
        return json.loads(text)["error"]
    return json.loads(text.strip().rpartition("data: ")[2])


async def pull(session: aiohttp.ClientSession, image: str) -> Any:
    return await events(session, "/api/images/pull", {"image": image})


async def used(server: RunningServer, session: aiohttp.ClientSession) -> float:
    """Return what a key uses of its quota, as `smokebox keys show` does."""
    id = session.headers["x-key-id"]
    async with client(server, admin=True) as admin:
        quotas = (await fetch(admin.get(f"/api/keys/{id}"))).body["quotas"]
    found: list[float] = [one["used"] for one in quotas if one["name"] == "total_images"]
    return found[0]


def layers_of(tmp_path: Path) -> set[str]:
    names = os.listdir(tmp_path / "home/images/layers")
    return {name for name in names if name.startswith("sha")}


async def test_pull_above_the_quota_is_refused_and_leaves_nothing(
    server: RunningServer, registry: RegistryServer, tmp_path: Path
) -> None:
    first, second = push(registry, data(3 * MIB)), push(registry, data(MIB // 2), data(2 * MIB))
    async with client(server, "acme") as acme:
        assert (await pull(acme, first))["pulled"]
        kept = layers_of(tmp_path)
        assert 3 * MIB <= await used(server, acme) < CEILING
        error = await pull(acme, second)
        assert (error["code"], error["fields"]["ceiling"]) == ("limit_reached", "total_images")
        assert not error["retryable"]
        assert layers_of(tmp_path) == kept
        assert 3 * MIB <= await used(server, acme) < CEILING
        assert (await fetch(acme.delete("/api/images", params={"image": first}))).status == 204
        assert (await pull(acme, second))["pulled"]


async def test_concurrent_pulls_share_the_quota(
    server: RunningServer, registry: RegistryServer
) -> None:
    names = [push(registry, data(MIB), data(MIB)) for _ in range(4)]
    async with client(server, "acme") as acme:
        results = await asyncio.gather(*(pull(acme, name) for name in names))
        assert any(one.get("code") == "limit_reached" for one in results)
        assert await used(server, acme) <= CEILING


async def test_bytes_are_counted_unpacked(server: RunningServer, registry: RegistryServer) -> None:
    bomb = push(registry, tar({"zeros": bytes(64 * MIB)}))
    many = push(registry, tar({str(number): b"" for number in range(10_000)}))
    async with client(server, "acme") as acme:
        for name in (bomb, many):
            assert (await pull(acme, name))["code"] == "limit_reached"
        assert await used(server, acme) == 0


async def test_a_layer_of_two_images_counts_once_and_a_shared_image_never(
    server: RunningServer, registry: RegistryServer
) -> None:
    base, shared = data(3 * MIB), push(registry, data(8 * MIB))
    names = [push(registry, base, data(1000, "own")) for _ in range(3)]
    async with client(server, "acme") as acme, client(server, admin=True) as admin:
        body = {"image": shared, "share": True}
        assert (await events(admin, "/api/images/pull", body))["pulled"]
        for name in (*names, shared):
            assert "image" in await pull(acme, name)
        assert 3 * MIB <= await used(server, acme) < CEILING


async def test_layers_of_another_key_count_for_both(
    server: RunningServer, registry: RegistryServer
) -> None:
    name, other = push(registry, data(3 * MIB)), push(registry, data(2 * MIB))
    async with client(server, "acme") as acme, client(server, "evil") as evil:
        assert (await pull(acme, name))["pulled"]
        assert (await pull(evil, other))["pulled"]
        assert (await pull(evil, name))["code"] == "limit_reached"
        assert await used(server, acme) >= 3 * MIB


async def test_sandbox_that_pulls_its_image_is_charged(
    server: RunningServer, registry: RegistryServer
) -> None:
    name = push(registry, data(5 * MIB))
    async with client(server, "acme") as acme:
        response = await fetch(acme.put("/api/sandboxes/acme-1", json={"image": name}))
        assert response.body["error"]["fields"]["ceiling"] == "total_images"


async def test_image_that_a_sandbox_keeps_counts_without_its_name(
    server: RunningServer, registry: RegistryServer, tmp_path: Path
) -> None:
    first, second = push(registry, data(3 * MIB)), push(registry, data(3 * MIB))
    async with client(server, "acme") as acme:
        response = await fetch(acme.put("/api/sandboxes/acme-1", json={"image": first}))
        assert response.status == 200, response.body
        assert (await fetch(acme.delete("/api/images", params={"image": first}))).status == 204
        assert (await pull(acme, second))["code"] == "limit_reached"
        await fetch(acme.delete("/api/sandboxes/acme-1"))
        server.state.host.builds.usage.forget()
        assert (await pull(acme, second))["pulled"]
        assert len(layers_of(tmp_path)) == 1


async def test_uploaded_contents_count(server: RunningServer, tmp_path: Path) -> None:
    async with client(server, "acme") as acme:
        statuses, most = [], 0.0
        for _ in range(5):
            content = random.Random(next(_numbers)).randbytes(MIB)
            query = {"digest": hashlib.sha256(content).hexdigest()}
            response = await fetch(
                acme.put("/api/builds/contents", params=query, data=io.BytesIO(content))
            )
            statuses.append(response.status)
            most = max(most, await used(server, acme))
        assert statuses == [204, 204, 204, 204, 429]
        # The last one is refused, and the others make room for the next try.
        assert most == CEILING
        assert await used(server, acme) == 0
        assert not [one for one in (tmp_path / "home/builds/content").rglob("*") if one.is_file()]


def context_of(content: bytes) -> dict[str, Any]:
    """Return the entry of a file `f` in a build context."""
    digest = hashlib.sha256(content).hexdigest()
    return {"path": "f", "type": "file", "size": len(content), "digest": digest, "mode": 0o644}


async def test_steps_and_images_of_builds_count(server: RunningServer) -> None:
    content = random.Random(1).randbytes(MIB + MIB // 2)
    entry = context_of(content)
    async with client(server, "acme") as acme:
        query = {"digest": entry["digest"]}
        await fetch(acme.put("/api/builds/contents", params=query, data=io.BytesIO(content)))
        copies = "FROM scratch\nCOPY f /a\n"
        body = {"dockerfile": copies, "context": [entry], "names": ["one:1"]}
        assert "digest" in await events(acme, "/api/builds", body)
        before = await used(server, acme)
        assert before >= 3 * MIB
        body["dockerfile"] = f"{copies}COPY f /b\n"
        error = await events(acme, "/api/builds", body)
        assert "total_images" in error["message"], error
        assert error["fields"]["line"] == 3
        # Contents and cached steps made room.
        assert await used(server, acme) < before
        assert (await fetch(acme.delete("/api/images", params={"image": "one:1"}))).status == 204
        assert await used(server, acme) == 0


async def test_cache_mounts_count_and_make_room(server: RunningServer) -> None:
    fill = "head -c 3000000 /dev/zero | tr '\\0' x > /c/$(date +%N)"
    run = f"RUN --mount=type=cache,target=/c {fill}"
    async with client(server, "acme") as acme:
        body = {"dockerfile": f"FROM host\n{run}\n", "no_cache": True}
        assert "digest" in await events(acme, "/api/builds", body)
        assert await used(server, acme) >= 3_000_000
        assert "total_images" in (await events(acme, "/api/builds", body))["message"]
        assert await used(server, acme) < MIB


async def test_a_step_is_stopped_at_what_is_left_of_the_quota(
    server: RunningServer, tmp_path: Path
) -> None:
    fill = "RUN yes | head -c 400000000 > /large; sleep 30"
    body = {"dockerfile": f"FROM host\n{fill}\n"}
    most = 0
    async with client(server, "acme") as acme:
        building = asyncio.create_task(events(acme, "/api/builds", body))
        while not building.done():
            most = max(most, await asyncio.to_thread(lambda: measure(str(tmp_path)).bytes))
            await asyncio.sleep(0.1)
        error = building.result()
        assert error["fields"]["line"] == 2, error
        assert "total_images" in error["message"]
        # It is noticed after a second or two.
        assert most < 300 * MIB
        assert await used(server, acme) < CEILING


async def test_digest_needs_a_name_that_the_ceiling_allows(
    server: RunningServer, registry: RegistryServer
) -> None:
    allowed = push(registry, data(1000), team="allowed")
    other = push(registry, data(1000), team="other")
    async with (
        client(server, "acme", profile="wide") as wide,
        client(server, "acme", profile="narrow") as narrow,
    ):
        digests = [(await pull(wide, name))["image"]["digest"] for name in (allowed, other)]
        create = [
            await fetch(narrow.put(f"/api/sandboxes/acme-{digest[-8:]}", json={"image": digest}))
            for digest in digests
        ]
        assert create[0].status == 200, create[0].body
        error = create[1].body["error"]
        assert (create[1].status, error["fields"]["ceiling"]) == (403, "images")
        body = {"dockerfile": f"FROM {digests[1]}\nWORKDIR /x\n"}
        assert "none of these names" in (await events(narrow, "/api/builds", body))["message"]
        digest = digests[1][-8:]
        wide_create = wide.put(f"/api/sandboxes/acme-{digest}", json={"image": digests[1]})
        assert (await fetch(wide_create)).status == 200


async def test_a_key_starts_what_it_built_on_an_image_of_its_profile(
    server: RunningServer,
) -> None:
    async with client(server, "alice", profile="narrow") as alice:
        built = await events(alice, "/api/builds", {"dockerfile": "FROM host\nENV a=1\n"})
        body = {"image": built["digest"]}
        async with alice.put("/api/sandboxes/alice-box", json=body) as response:
            assert response.status in (200, 201), await response.text()
    async with (
        client(server, "bob", profile="narrow") as bob,
        bob.put("/api/sandboxes/bob-box", json=body) as response,
    ):
        assert response.status in (403, 404)


async def start(session: aiohttp.ClientSession, id: str, image: str) -> Any:
    """Create a sandbox, and return the file /who of it, or the code of the error."""
    created = await fetch(session.put(f"/api/sandboxes/{id}", json={"image": image}))
    if created.status != 200:
        return created.body["error"]["code"]
    query = {"path": "/who"}
    async with session.get(f"/api/sandboxes/{id}/files", params=query) as response:
        return (await response.text()).strip()


def who(name: str, tag: str) -> dict[str, Any]:
    """Return a build of an image with a file that names who built it."""
    return {"dockerfile": f"FROM host\nRUN echo {name} > /who\n", "names": [tag]}


async def test_a_key_starts_what_it_built_by_its_own_tag(server: RunningServer) -> None:
    async with client(server, "alice", profile="narrow") as alice:
        await events(alice, "/api/builds", who("alice", "mine:1"))
        assert await start(alice, "alice-a", "mine:1") == "alice"
        body = {"dockerfile": "FROM mine:1\nCOPY --from=mine:1 /who /copy\n", "names": ["next:1"]}
        assert "digest" in await events(alice, "/api/builds", body)
        assert await start(alice, "alice-b", "next:1") == "alice"
        async with client(server, "bob", profile="narrow") as bob:
            assert await start(bob, "bob-a", "mine:1") == "forbidden"
        forked = await fetch(alice.post("/api/sandboxes/alice-a/fork", json={"count": 1}))
        assert forked.status == 201, forked.body
        # What it has goes on without the name, and nothing else starts by it.
        await fetch(alice.delete("/api/images", params={"image": "mine:1"}))
        assert await start(alice, "alice-a", "mine:1") == "alice"
        assert await start(alice, "alice-c", "mine:1") == "forbidden"


@pytest.mark.parametrize("prefix", ["alice", ""])
async def test_an_own_tag_opens_no_image_of_others_with_that_name(
    server: RunningServer, registry: RegistryServer, prefix: str
) -> None:
    secret = push(registry, data(1000))
    async with (
        client(server, prefix, profile="narrow") as alice,
        client(server, admin=True) as admin,
    ):
        for tag in ("shared:1", secret):
            await events(admin, "/api/builds", {**who("operator", tag), "share": True})
            assert await start(alice, "alice-a", tag) == "forbidden"
            await events(alice, "/api/builds", who("alice", tag))
            assert await start(alice, f"alice-{len(tag)}", tag) == "alice"
            built = await events(alice, "/api/builds", {"dockerfile": f"FROM {tag}\nRUN cat /who"})
            assert "digest" in built
        assert (await pull(alice, secret))["code"] == "forbidden"
        await fetch(alice.delete("/api/images", params={"image": secret}))
        assert await start(alice, "alice-z", secret) == "forbidden"


async def test_an_own_tag_opens_no_snapshot_of_another_image(
    server: RunningServer, registry: RegistryServer
) -> None:
    other = push(registry, data(1000), team="other")
    async with (
        client(server, "acme", profile="wide") as wide,
        client(server, "acme", profile="narrow") as narrow,
    ):
        await fetch(wide.put("/api/sandboxes/acme-a", json={"image": other}))
        made = await fetch(wide.post("/api/sandboxes/acme-a/snapshots", json={"name": "s"}))
        assert made.status == 201, made.body
        await events(narrow, "/api/builds", who("acme", other))
        assert await start(narrow, "acme-b", other) == "acme"
        for body in ({"snapshot": "s"}, {"image": "snapshot:s"}):
            refused = await fetch(narrow.put("/api/sandboxes/acme-c", json=body))
            assert refused.status == 403, refused.body
        forked = await fetch(narrow.post("/api/sandboxes/acme-a/fork", json={"count": 1}))
        assert forked.status == 403, forked.body
