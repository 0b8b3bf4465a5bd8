"""Sandboxes start from references, keep their image, and are refused those of others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from aiohttp import web

from engine.images.registry.access_to import LOOPBACK, plain
from oci_images import TestImage, busybox, tar
from smokebox.engine.host import Host
from smokebox.engine.images.registry.access import RegistryAccess, RegistryConfig
from smokebox.errors import Forbidden, NotFound, RegistryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from registry_server import RegistryProxy, RegistryServer


@pytest_asyncio.fixture
async def host(tmp_path: Path, proxy: RegistryProxy) -> AsyncIterator[Host]:
    """An engine whose registry of short names has a mirror, as the operator configured it."""
    settings = plain(proxy.authority)
    mirrored = {"docker.io": RegistryConfig(mirrors=(proxy.authority,))}
    settings = replace(settings, registries={**settings.registries, **mirrored})
    async with await Host.open(tmp_path / "home", pool=0, registries=settings) as host:
        yield host


async def test_a_sandbox_starts_from_a_reference(
    host: Host, registry: RegistryServer, repository: str, proxy: RegistryProxy
) -> None:
    name = repository.replace("/", "-")
    busybox().push(registry.url, f"library/{name}", "3.12-slim")
    sandbox = await host.create("box", image=f"{name}:3.12-slim")
    result = await sandbox.exec(["/bin/sh", "-c", "cat /motd; echo $GREETING"])
    assert result.stdout == "hellohi\n"
    await sandbox.sleep()

    async def down(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500)

    proxy.faults.append(down)
    assert (await sandbox.exec(["cat", "/motd"])).stdout == "hello"
    other = await host.create("other", image=f"docker.io/{name}:3.12-slim")
    assert (await other.exec(["cat", "/motd"])).stdout == "hello"


async def test_a_sandbox_keeps_its_image_when_the_tag_moves(
    host: Host, registry: RegistryServer, repository: str, proxy: RegistryProxy
) -> None:
    image = busybox()
    image.push(registry.url, repository, "1")
    name = f"{proxy.authority}/{repository}:1"
    sandbox = await host.create("box", image=name)
    moved = TestImage(layers=[*image.layers, tar({"motd": b"moved"})])
    moved.push(registry.url, repository, "1")
    access = RegistryAccess(private=LOOPBACK)
    assert (await host.registries.pull(name, access)).pulled
    await sandbox.sleep()
    assert (await sandbox.exec(["cat", "/motd"])).stdout == "hello"
    fresh = await host.create("fresh", image=name)
    assert (await fresh.exec(["cat", "/motd"])).stdout == "moved"


async def test_the_seam_decides_who_may_pull(
    tmp_path: Path, registry: RegistryServer, repository: str
) -> None:
    busybox().push(registry.url, repository, "1")
    name = f"{registry.authority}/{repository}:1"
    asked: list[tuple[str, str | None]] = []

    def access(image: str, scope: str | None) -> RegistryAccess:
        asked.append((image, scope))
        if scope is None or not scope.startswith("alice-"):
            raise Forbidden("not for you")
        return RegistryAccess(scope="alice-", private=LOOPBACK)

    settings = plain(registry.authority)
    async with await Host.open(
        tmp_path / "home", pool=0, registries=settings, pull_access=access
    ) as host:
        await host.create("alice-1", image=name)
        await host.create("alice-2", image=name)
        with pytest.raises(Forbidden, match="not for you"):
            await host.create("bob-1", image=name)
        assert await host.sandbox("bob-1").info() is None
        assert asked == [(name, "alice-1"), (name, "bob-1")]


async def test_removing_takes_only_what_the_scope_owns(
    tmp_path: Path, registry: RegistryServer, repository: str
) -> None:
    busybox().push(registry.url, repository, "1")
    name = f"{registry.authority}/{repository}:1"
    settings = plain(registry.authority)
    access = RegistryAccess(private=LOOPBACK)
    async with await Host.open(tmp_path / "home", pool=0, registries=settings) as host:
        for scope in ("alice-", "bob-"):
            pulled = await host.registries.pull(name, replace(access, scope=scope))
        digest = pulled.image.digest
        await host.images.remove(name, scope="bob-")
        assert await host.images.list(scope="bob-") == []
        with pytest.raises(NotFound):
            await host.images.remove(digest, scope="bob-")
        assert (await host.images.inspect(name, scope="alice-")).digest == digest
        await host.registries.pull(name, access, share=True)
        with pytest.raises(Forbidden, match="operator"):
            await host.images.remove(name, scope="carol-")
        await host.images.remove(digest, scope="alice-")
        assert (await host.images.inspect(name, scope="alice-")).digest == digest
        await host.images.remove(name)
        assert await host.images.list() == []


async def test_unknown_names_fail_with_a_next_step(host: Host) -> None:
    with pytest.raises((NotFound, RegistryError)) as caught:
        await host.create("box", image="hots")
    assert "Did you mean 'host'" in caught.value.hint
    assert await host.sandbox("box").info() is None
