"""Attacks with names of images: a tenant's key must not open a directory of the host."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from attack.sandbox_code import Canary


@dataclass(frozen=True, slots=True)
class Tenant:
    """An HTTP client with a key for sandboxes whose ids begin with `tenant-`."""

    session: aiohttp.ClientSession

    async def create(self, image: str) -> tuple[int, dict[str, Any]]:
        """Try to create the sandbox `tenant-box`, and return the status and the response."""
        async with self.session.put("/api/sandboxes/tenant-box", json={"image": image}) as response:
            return response.status, await response.json()

    async def sandboxes(self) -> list[Any]:
        """List the sandboxes that the tenant sees."""
        async with self.session.get("/api/sandboxes") as response:
            found: list[Any] = (await response.json())["sandboxes"]
            return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a root file system that the operator named."""
    (tmp_path / "srv/base/etc").mkdir(parents=True)
    (tmp_path / "srv/base/etc/motd").write_text("of the image")
    (tmp_path / "srv/base/outside").symlink_to(tmp_path)
    return tmp_path / "srv/base"


@pytest_asyncio.fixture
async def tenant(tmp_path: Path, base: Path) -> AsyncIterator[Tenant]:
    """Return a tenant of a server whose operator named the directory `base`."""
    settings = ServerSettings(
        home=str(tmp_path / "home"),
        host="127.0.0.1",
        keys=True,
        pool=0,
        directories={"base": str(base)},
    )
    async with run_server(settings) as server:
        connector = aiohttp.UnixConnector(server.socket)
        async with (
            aiohttp.ClientSession("http://localhost", connector=connector) as operator,
            operator.post("/api/keys", json={"name": "tenant", "prefix": "tenant-"}) as response,
        ):
            key = (await response.json())["key"]
        headers = {"authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(server.url, headers=headers) as session:
            yield Tenant(session)


PATHS = [
    "dir:",
    "dir:/",
    "dir:/var",
    "dir:/root",
    "dir:/etc/shadow",
    "dir:../x",
    "dir:..",
    "dir:.",
    "dir:base/../..",
    "dir:base/outside",
    "dir:base/",
    "dir:/proc/self/root",
    "dir:~root",
    "dir:base\0",
    "dir:base\n",
    "dir:$HOME",
    "dir:%2fvar",
    "dir:dir:/var",
    "dir:Base",
    "dir:other",
]


@pytest.mark.parametrize("image", PATHS)
async def test_path_of_the_host_is_no_image(tenant: Tenant, tmp_path: Path, image: str) -> None:
    status, body = await tenant.create(image)
    assert (status, body["error"]["code"]) == (403, "forbidden")
    assert "server.toml" in body["error"]["hint"]
    assert str(tmp_path) not in str(body)
    assert await tenant.sandboxes() == []


@pytest.mark.parametrize(
    "image",
    ["oci:/var", "oci:../x", "oci:base", "archive:/var", "/var", "../x", "./base", "."],
)
async def test_unknown_image_is_not_found(tenant: Tenant, tmp_path: Path, image: str) -> None:
    status, body = await tenant.create(image)
    assert (status, body["error"]["code"]) == (404, "not_found")
    assert str(tmp_path) not in str(body)
    assert await tenant.sandboxes() == []


@pytest.mark.parametrize(
    "image",
    [
        *("file:/var", "file:///var", "overlay:/var", "host:/var", "host/../..", "DIR:base"),
        *("a/../../etc", "127.0.0.1:80/../x", "x@sha256:../../etc", "x:../../etc", "x\0y"),
    ],
)
async def test_path_is_no_reference(tenant: Tenant, tmp_path: Path, image: str) -> None:
    status, body = await tenant.create(image)
    assert (status, body["error"]["code"]) == (400, "invalid_option")
    assert str(tmp_path) not in str(body)
    assert await tenant.sandboxes() == []


async def test_refusal_does_not_tell_which_paths_exist(tenant: Tenant, canary: Canary) -> None:
    def pattern(path: str, response: tuple[int, dict[str, Any]]) -> str:
        status, body = response
        body["error"].pop("request_id", None)
        return f"{status} {body}".replace(path, "PATH")

    folder = str(canary.folder)
    paths = [folder, canary.secret, f"{folder}/missing", "/root/.ssh", "/nowhere/at/all"]
    answers = {pattern(path, await tenant.create(f"dir:{path}")) for path in paths}
    assert len(answers) == 1
    assert canary.unharmed


async def test_broken_directory_is_not_named_to_the_tenant(
    tenant: Tenant, base: Path, tmp_path: Path
) -> None:
    base.rename(tmp_path / "moved")
    gone = await tenant.create("dir:base")
    base.symlink_to(tmp_path / "home")
    inside = await tenant.create("dir:base")
    for status, body in (gone, inside):
        assert (status, body["error"]["code"]) == (404, "not_found")
        assert "'dir:base'" in body["error"]["message"]
        assert str(tmp_path) not in str(body)
    assert await tenant.sandboxes() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read every directory")
async def test_unreadable_directory_is_not_named_to_the_tenant(
    tenant: Tenant, base: Path, tmp_path: Path
) -> None:
    base.chmod(0)
    try:
        status, body = await tenant.create("dir:base")
    finally:
        base.chmod(0o755)
    assert status < 500
    assert str(tmp_path) not in str(body)
    assert await tenant.sandboxes() == []


async def test_named_directory_is_an_image_and_nothing_above_it(
    tenant: Tenant, canary: Canary
) -> None:
    status, body = await tenant.create("dir:base")
    assert (status, body["image"]) == (200, "dir:base")
    files = "/api/sandboxes/tenant-box/files"
    async with tenant.session.get(files, params={"path": "/etc/motd"}) as response:
        assert await response.text() == "of the image"
    for path in ("/../../canary/secret", "/outside/canary/secret", canary.secret):
        async with tenant.session.get(files, params={"path": path}) as response:
            assert response.status == 404
