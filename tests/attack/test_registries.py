"""Attacks by registries and tenants: no request reaches what the tenant may not reach itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from aiohttp import web

from attack.hostile_server import PRIVATE, respond_with
from oci_images import TestImage, sha256, tar
from registry_server import RegistryProxy
from smokebox.engine.images.catalog import ImageCatalog
from smokebox.engine.images.layer_store import LayerStore
from smokebox.engine.images.registry.access import (
    Credentials,
    RegistryAccess,
    RegistryConfig,
    RegistrySettings,
)
from smokebox.engine.images.registry.pull import RegistryImages
from smokebox.engine.record.record import Record
from smokebox.errors import Forbidden, RegistryError, SmokeboxError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

IMAGE = TestImage(layers=[tar({"a": b"a"})])
SECRET = Credentials(username="me", password="s3cret")


@pytest_asyncio.fixture
async def images(tmp_path: Path, hostile: RegistryProxy) -> AsyncIterator[RegistryImages]:
    """Images of an engine whose operator allows plain HTTP to everything that is tried."""
    ports = ("", ":80", f":{hostile.port}")
    names = [hostile.authority, *(f"{host}{port}" for host in PRIVATE for port in ports)]
    settings = RegistrySettings(registries={one: RegistryConfig(plain_http=True) for one in names})
    record = await Record.open(str(tmp_path / "record.db"))
    layers = LayerStore(str(tmp_path / "layers"))
    yield RegistryImages(settings, ImageCatalog(record, layers))
    layers.close()
    await record.aclose()


@pytest.fixture
def access(hostile: RegistryProxy) -> RegistryAccess:
    """Rights of a tenant who may reach the attacker's registry, and has credentials for it."""
    return RegistryAccess(
        scope="tenant-",
        private=(hostile.authority,),
        credentials={hostile.authority: SECRET},
    )


@pytest.mark.parametrize("host", PRIVATE)
@pytest.mark.parametrize("port", ["", ":80"])
async def test_registry_at_a_private_address_is_not_contacted(
    images: RegistryImages, access: RegistryAccess, host: str, port: str
) -> None:
    if host == "localhost" and not port:
        host = "localhost:443"
    if "." not in host and ":" not in host:
        host += ":80"
    with pytest.raises(Forbidden, match="public address"):
        await images.pull(f"{host}{port if ':' not in host else ''}/x/y:1", access)


@pytest.mark.parametrize("host", PRIVATE)
async def test_token_realm_at_a_private_address_is_not_contacted(
    images: RegistryImages, access: RegistryAccess, hostile: RegistryProxy, host: str
) -> None:
    challenge = f'Bearer realm="http://{host}/latest/meta-data",service="x"'
    hostile.faults.append(respond_with(401, **{"www-authenticate": challenge}))
    with pytest.raises(Forbidden, match="public address"):
        await images.pull(f"{hostile.authority}/x:1", access)
    # The password was for the registry, and it never asked for it in the right way.
    assert all("authorization" not in one for one in hostile.headers)


@pytest.mark.parametrize("host", PRIVATE)
@pytest.mark.parametrize("part", ["/manifests/", "/blobs/"])
async def test_redirect_to_a_private_address_is_not_followed(
    images: RegistryImages, access: RegistryAccess, hostile: RegistryProxy, host: str, part: str
) -> None:
    async def serve(request: web.Request) -> web.StreamResponse:
        if part in request.path:
            return web.Response(status=307, headers={"location": f"http://{host}/latest/"})
        return web.Response(body=IMAGE.manifest, content_type=IMAGE.media_type)

    hostile.faults.append(serve)
    with pytest.raises(Forbidden, match="public address"):
        await images.pull(f"{hostile.authority}/x:1", access)


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "gopher://127.0.0.1/", "unix:/run/docker.sock", "http://a@127.0.0.2/"],
)
async def test_redirect_to_another_scheme_is_refused(
    images: RegistryImages, access: RegistryAccess, hostile: RegistryProxy, location: str
) -> None:
    hostile.faults.append(respond_with(302, location=location))
    with pytest.raises(RegistryError, match="redirects"):
        await images.pull(f"{hostile.authority}/x:1", access)


async def test_credentials_do_not_follow_a_redirect_or_a_realm(
    images: RegistryImages, access: RegistryAccess, hostile: RegistryProxy
) -> None:
    async with RegistryProxy(None).open() as other:
        both = replace(access, private=(hostile.authority, other.authority))
        allowed = {**images.settings.registries, other.authority: RegistryConfig(plain_http=True)}
        images.settings = replace(images.settings, registries=allowed)

        async def serve(request: web.Request) -> web.StreamResponse:
            if "authorization" not in request.headers:
                headers = {"www-authenticate": 'Basic realm="x"'}
                return web.Response(status=401, headers=headers)
            return web.Response(status=302, headers={"location": f"http://{other.authority}/x"})

        hostile.faults.append(serve)
        with pytest.raises(SmokeboxError):
            await RegistryImages(images.settings, images._catalog).pull(
                f"{hostile.authority}/x:1", both
            )
        assert other.seen
        assert all("authorization" not in one for one in other.headers)


async def test_name_that_resolves_to_a_private_address_later_is_refused(
    images: RegistryImages, access: RegistryAccess
) -> None:
    answers = [["192.0.2.1"], ["127.0.0.2"]]
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return answers[min(len(asked), len(answers)) - 1]

    settings = replace(images.settings, registries={"rebind.test": RegistryConfig(plain_http=True)})
    rebound = RegistryImages(settings, images._catalog, resolver=resolve)
    with pytest.raises(SmokeboxError) as caught:
        async with asyncio.timeout(15):
            await rebound.pull("rebind.test/x:1", access, timeout=1)
    assert asked
    assert not isinstance(caught.value, RegistryError) or caught.value.reason == "network"
    with pytest.raises(Forbidden, match="public address"):
        await rebound.pull("rebind.test/x:1", access)


@pytest.mark.parametrize(
    "layer",
    [
        {"urls": ["http://169.254.169.254/latest/"]},
        {"mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"},
        {"mediaType": "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"},
    ],
)
async def test_foreign_layer_is_refused(
    images: RegistryImages, access: RegistryAccess, hostile: RegistryProxy, layer: dict[str, object]
) -> None:
    found = {
        "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
        "digest": sha256(IMAGE.blobs[0]),
        "size": len(IMAGE.blobs[0]),
        **layer,
    }
    image = replace(IMAGE, extra={"layers": [found]})

    async def serve(request: web.Request) -> web.StreamResponse:
        return web.Response(body=image.manifest, content_type=image.media_type)

    hostile.faults.append(serve)
    with pytest.raises(RegistryError, match="foreign layer"):
        await images.pull(f"{hostile.authority}/x:1", access)
    assert not [path for _, path in hostile.seen if "/blobs/" in path]


async def test_ceiling_of_the_key_holds_for_redirects_and_realms(
    images: RegistryImages, access: RegistryAccess, hostile: RegistryProxy
) -> None:
    def only_the_registry(host: str) -> None:
        if host != "127.0.0.1":
            raise Forbidden(f"{host} is above the ceiling")

    limited = replace(access, check_host=only_the_registry)
    hostile.faults.append(respond_with(302, location="https://example.com/x"))
    with pytest.raises(Forbidden, match=r"example\.com is above"):
        await images.pull(f"{hostile.authority}/x:1", limited)
    realm = 'Bearer realm="https://example.com/token"'
    hostile.faults[:] = [respond_with(401, **{"www-authenticate": realm})]
    with pytest.raises(Forbidden, match=r"example\.com is above"):
        await images.pull(f"{hostile.authority}/x:1", limited)
