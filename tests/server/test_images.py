"""Images over the API: pulled with progress, listed, and removed by those who own them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from oci_images import TestImage, busybox, push_with_password, sha256, tar
from registry_server import PASSWORD, USER, RegistryServer, htpasswd_auth, run_registry
from server.key_client import client
from smokebox.engine.images.registry.access import (
    Credentials,
    RegistryConfig,
    RegistrySettings,
)
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings
from smokebox.tenancy.profile import Profile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    import aiohttp

    from smokebox.server.server import RunningServer

_numbers = itertools.count(1)
IMAGE = TestImage(layers=[tar({"etc": None, "data": b"x"})], config={"Env": ["A=1"]})
KNOWN = Credentials(username=USER, password=PASSWORD)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """A registry with a password."""
    directory = tmp_path_factory.mktemp("registry")
    with run_registry(directory, htpasswd_auth(directory)) as server:
        yield server


@pytest_asyncio.fixture
async def image(registry: RegistryServer) -> str:
    """The reference of an image that needs a password."""
    repository = f"team/image-{next(_numbers)}"
    await push_with_password(IMAGE, registry.authority, repository, KNOWN)
    return f"{registry.authority}/{repository}:1"


@pytest_asyncio.fixture
async def server(tmp_path: Path, registry: RegistryServer) -> AsyncIterator[RunningServer]:
    """A server that may reach loopback, with its own credentials for the registry."""
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    config = RegistryConfig(plain_http=True, username=USER, password_file=str(password))
    settings = ServerSettings(
        home=str(tmp_path / "home"),
        host="127.0.0.1",
        keys=True,
        pool=0,
        private_networks=("127.0.0.0/8",),
        registries=RegistrySettings(registries={registry.authority: config}),
        profiles={
            "named": Profile(name="named", images=(f"{registry.authority}/team/*",)),
            "narrow": Profile(name="narrow", images=("host", "python:*")),
        },
    )
    async with run_server(settings) as server:
        yield server


async def pull(session: aiohttp.ClientSession, image: str, **body: Any) -> list[tuple[str, Any]]:
    """Pull an image, and return the events."""
    async with session.post("/api/images/pull", json={"image": image, **body}) as response:
        text = await response.text()
        if response.content_type != "text/event-stream":
            return [("error", json.loads(text)["error"])]
    events = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.splitlines() if line[:1] != ":")
        if fields:
            events.append((fields["event"], json.loads(fields["data"])))
    return events


def credentials(registry: RegistryServer) -> dict[str, str]:
    return {"registry": registry.authority, "username": USER, "password": PASSWORD}


async def images(session: aiohttp.ClientSession) -> list[dict[str, Any]]:
    async with session.get("/api/images") as response:
        found: list[dict[str, Any]] = (await response.json())["images"]
        return found


async def test_a_pull_reports_layers_and_ends_with_the_image(
    server: RunningServer, registry: RegistryServer, image: str
) -> None:
    async with client(server, "alice") as alice:
        events = await pull(alice, image, credentials=credentials(registry))
        assert {name for name, _ in events[:-1]} == {"layer"}
        name, result = events[-1]
        assert (name, result["pulled"], result["note"]) == ("pulled", True, "")
        assert image in result["image"]["names"]
        async with alice.get("/api/images/inspect", params={"image": image}) as response:
            details = await response.json()
        assert details["config"]["config"]["Env"] == ["A=1"]
        digest = result["image"]["digest"]
        assert details["digest"] == digest
        assert details["config"]["rootfs"]["diff_ids"] == [sha256(one) for one in IMAGE.layers]
        known = (await pull(alice, image, policy="missing"))[-1][1]
        assert (known["pulled"], known["reference"]) == (False, result["reference"])
        # As the command line shows it.
        short = {"image": digest[: len("sha256:") + 12]}
        async with alice.get("/api/images/inspect", params=short) as response:
            assert (await response.json())["digest"] == digest


async def test_tenants_see_start_and_remove_only_their_images(
    server: RunningServer, registry: RegistryServer, image: str
) -> None:
    async with client(server, "alice") as alice, client(server, "bob") as bob:
        done = (await pull(alice, image, credentials=credentials(registry)))[-1][1]
        digest = done["image"]["digest"]
        assert await images(bob) == []
        for name in (image, digest, done["reference"]):
            async with bob.delete("/api/images", params={"image": name}) as response:
                assert response.status == 404
            async with bob.get("/api/images/inspect", params={"image": name}) as response:
                assert response.status == 404
            async with bob.put("/api/sandboxes/bob-1", json={"image": name}) as response:
                assert response.status in (404, 422), await response.text()
            push = {"image": name, "target": f"{registry.authority}/team/stolen:1"}
            async with bob.post("/api/images/push", json=push) as response:
                assert response.status == 404
        name, error = (await pull(bob, image))[-1]
        assert (name, error["fields"]["reason"]) == ("error", "authentication")
        assert [one["digest"] for one in await images(alice)] == [digest]
        async with alice.delete("/api/images", params={"image": image}) as response:
            assert response.status == 204
        assert await images(alice) == []


async def test_what_an_administrator_pulls_is_shared_only_on_request(
    server: RunningServer, image: str
) -> None:
    async with client(server, admin=True) as admin, client(server, "bob") as bob:
        # With the server's own credentials.
        assert (await pull(admin, image))[-1][0] == "pulled"
        assert await images(bob) == []
        assert (await pull(bob, image, share=True))[-1][1]["code"] == "forbidden"
        assert (await pull(admin, image, share=True))[-1][0] == "pulled"
        assert len(await images(bob)) == 1
        async with bob.delete("/api/images", params={"image": image}) as response:
            assert response.status == 403
        async with bob.post("/api/images/prune", json={}) as response:
            assert response.status == 403
        async with admin.delete("/api/images", params={"image": image}) as response:
            assert response.status == 204
        assert await images(bob) == []
        async with admin.post("/api/images/prune", json={}) as response:
            assert response.status == 200


async def test_profiles_limit_references_and_the_servers_credentials(
    server: RunningServer, registry: RegistryServer, image: str
) -> None:
    async with client(server, "a", profile="narrow") as narrow:
        for name in (image, "debian:12", "docker.io/library/debian"):
            error = (await pull(narrow, name))[-1][1]
            assert (error["code"], error["fields"]["ceiling"]) == ("forbidden", "images")
        # Allowed however it is spelled; the ceiling is not what fails.
        for name in ("python:3", "docker.io/library/python:3"):
            assert (await pull(narrow, name, timeout=0.01))[-1][1]["code"] != "forbidden"
    async with client(server, "b", profile="named") as named:
        assert (await pull(named, image))[-1][0] == "pulled"


async def test_a_sandbox_of_a_private_image_starts_after_its_pull(
    server: RunningServer, registry: RegistryServer
) -> None:
    repository = f"team/busybox-{next(_numbers)}"
    await push_with_password(busybox(), registry.authority, repository, KNOWN)
    name = f"{registry.authority}/{repository}:1"
    async with client(server, "alice") as alice:
        async with alice.put("/api/sandboxes/alice-1", json={"image": name}) as response:
            assert (await response.json())["error"]["fields"]["reason"] == "authentication"
        assert (await pull(alice, name, credentials=credentials(registry)))[-1][0] == "pulled"
        async with alice.put("/api/sandboxes/alice-1", json={"image": name}) as response:
            assert (await response.json())["image"] == name
        command = {"command": ["cat", "/motd"]}
        async with alice.post("/api/sandboxes/alice-1/exec", json=command) as response:
            assert (await response.json())["stdout"] == "hello"


async def test_credentials_are_in_no_file_and_no_error(
    server: RunningServer,
    registry: RegistryServer,
    image: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret = {"registry": registry.authority, "username": "me", "password": "s3cr3t-passw0rd"}
    async with client(server, "alice") as alice:
        error = (await pull(alice, image, credentials=secret))[-1][1]
        assert error["fields"]["reason"] == "authentication"
        assert (await pull(alice, image, credentials=credentials(registry)))[-1][0] == "pulled"
    assert "s3cr3t" not in json.dumps(error) + caplog.text
    for path in (tmp_path / "home").rglob("*"):
        if path.is_file() and "/images/" not in str(path):
            data = path.read_bytes()
            assert b"s3cr3t" not in data
            assert PASSWORD.encode() not in data


async def test_an_image_is_pushed_under_another_name(
    server: RunningServer, registry: RegistryServer, image: str
) -> None:
    target = f"{registry.authority}/team/pushed-{next(_numbers)}:2"
    async with client(server, admin=True) as admin:
        await pull(admin, image)
        async with admin.post(
            "/api/images/push", json={"image": image, "target": target}
        ) as response:
            text = await response.text()
        assert "event: pushed" in text, text
        assert (await pull(admin, target))[-1][0] == "pulled"


def test_the_representation_of_credentials_has_no_secret() -> None:
    from smokebox.wire.requests import RegistryCredentials

    found = RegistryCredentials(registry="r", username="u", password="s3cret", identity_token="t0k")
    assert "s3cret" not in repr(found)
    assert "t0k" not in repr(replace(KNOWN, identity_token="t0k"))
