"""Recipes over the API: who may build one, and with which progress."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from server.key_client import client
from smokebox.engine.images.registry.access import RegistrySettings
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings
from smokebox.tenancy.profile import Profile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import aiohttp

    from smokebox.server.server import RunningServer


@pytest_asyncio.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningServer]:
    """A server with a recipe that needs no network, and none of a registry."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    folder = tmp_path / "recipes" / "host"
    folder.mkdir(parents=True)
    (folder / "base.Dockerfile").write_text("FROM host\nRUN echo hello && date +%N > /stamp\n")
    (folder / "install.sh").write_text("")
    settings = ServerSettings(
        home=str(tmp_path / "home"),
        host="127.0.0.1",
        keys=True,
        pool=0,
        registries=RegistrySettings(default="127.0.0.1:1"),
        profiles={
            "closed": Profile(name="closed", images=("host",)),
            "open": Profile(name="open", images=("recipe:*",), egress=()),
        },
    )
    async with run_server(settings) as server:
        server.state.host.recipes.folder = tmp_path / "recipes"
        yield server


async def build(session: aiohttp.ClientSession, **body: Any) -> list[tuple[str, Any]]:
    """Build a recipe, and return the events."""
    async with session.post("/api/builds/recipes", json=body) as response:
        if response.status != 200:
            return [("refused", await response.json())]
        text = await response.text()
    events = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in fields:
            events.append((fields["event"], json.loads(fields["data"])))
    return events


async def test_a_key_builds_a_recipe_with_progress_and_starts_it(server: RunningServer) -> None:
    # Its policy reaches no host: that of a recipe is the server's.
    async with client(server, "a-", profile="open") as session:
        events = await build(session, recipe="recipe:base")
        assert events[-1][0] == "image"
        assert "hello\n" in [one.get("data") for _, one in events]
        assert any("on the programs of this host" in one.get("data", "") for _, one in events)
        async with session.put("/api/sandboxes/a-box", json={"image": "recipe:base"}) as response:
            assert response.status in (200, 201)
        async with session.get("/api/images") as response:
            (image,) = (await response.json())["images"]
            assert image["names"] == ["recipe:base"]


async def test_a_profile_decides_about_recipes(server: RunningServer) -> None:
    async with client(server, "c-", profile="closed") as session:
        ((kind, refusal),) = await build(session, recipe="recipe:base")
        assert (kind, refusal["error"]["code"]) == ("refused", "forbidden")
        async with session.put("/api/sandboxes/c-box", json={"image": "recipe:base"}) as response:
            assert response.status == 403
    assert not await server.state.host.images.list()


async def test_only_an_administrator_builds_one_again(server: RunningServer) -> None:
    async with client(server, "a-", profile="open") as session:
        ((kind, refusal),) = await build(session, recipe="recipe:base", no_cache=True)
        assert (kind, refusal["error"]["code"]) == ("refused", "forbidden")
    async with client(server, admin=True) as session:
        first = (await build(session, recipe="recipe:base"))[-1][1]["digest"]
        assert (await build(session, recipe="recipe:base"))[-1][1]["digest"] == first
        again = (await build(session, recipe="recipe:base", no_cache=True))[-1][1]["digest"]
        assert again != first


async def test_a_tenant_neither_names_nor_removes_a_recipe(server: RunningServer) -> None:
    async with client(server, "a-", profile="open") as session:
        await build(session, recipe="recipe:base")
        body = {"dockerfile": "FROM scratch", "names": ["recipe:base"]}
        async with session.post("/api/builds", json=body) as response:
            assert response.status == 400
        async with session.delete("/api/images", params={"image": "recipe:base"}) as response:
            assert response.status == 403
    assert await server.state.host.images.inspect("recipe:base")


@pytest.mark.parametrize("name", ["recipe:bse", "base", "recipe:../../etc/passwd", ""])
async def test_an_unknown_recipe_is_not_found(server: RunningServer, name: str) -> None:
    async with client(server, admin=True) as session:
        ((kind, refusal),) = await build(session, recipe=name)
        assert (kind, refusal["error"]["code"]) == ("refused", "not_found")
