"""Pulls into the layer store and the catalog: once, resumed, and only for those who may."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from engine.images.registry.access_to import LOOPBACK, plain
from oci_images import TestImage, push_index, push_with_password, sha256, tar
from registry_server import PASSWORD, USER, RegistryProxy, RegistryServer, cut_off
from smokebox.engine.images.registry.access import Credentials, RegistryAccess, RegistryConfig
from smokebox.engine.images.registry.pull import RegistryImages
from smokebox.errors import DeadlineExceeded, ImageError, NotFound, RegistryError, SmokeboxError

if TYPE_CHECKING:
    from pathlib import Path

    from engine.images.registry.conftest import Stores
    from smokebox.types import LayerProgress

ACCESS = RegistryAccess(private=LOOPBACK)
ALICE = replace(ACCESS, scope="alice-")
BOB = replace(ACCESS, scope="bob-")
BASE = tar({"etc": None, "etc/os": b"base"})
DATA = random.Random(2).randbytes(2 << 20)
IMAGE = TestImage(layers=[BASE, tar({"data": DATA})], config={"Env": ["A=1"], "WorkingDir": "/srv"})


def images_of(stores: Stores, *authorities: str) -> RegistryImages:
    """Return registry images that reach these registries by plain HTTP."""
    return RegistryImages(plain(*authorities), stores.catalog)


async def test_an_image_is_unpacked_recorded_and_pinned(
    registry: RegistryServer, repository: str, stores: Stores
) -> None:
    digest = IMAGE.push(registry.url, repository, "1")
    name = f"{registry.authority}/{repository}"
    images = images_of(stores, registry.authority)
    states: dict[str, LayerProgress] = {}
    result = await images.pull(
        f"{name}:1", ALICE, progress=lambda one: states.update({one.digest: one})
    )
    assert (result.pulled, result.reference, result.note) == (True, f"{name}@{digest}", "")
    assert result.image.digest == sha256(IMAGE.config_blob)
    assert result.image.config.env == {"A": "1"}
    assert {(one.state, one.done == one.total) for one in states.values()} == {("done", True)}
    assert [one.digest for one in states.values()] == [sha256(one) for one in IMAGE.blobs]
    top, bottom = (stores.layers.get(one.id) for one in result.image.layers)
    assert top is not None and bottom is not None
    for reference in (f"{name}:1", f"{name}@{digest}", f"{name}:other@{digest}"):
        assert (await images.pull(reference, ALICE, policy="missing")).image.digest == (
            result.image.digest
        )


async def test_a_known_image_starts_without_its_registry(
    registry: RegistryServer, repository: str, stores: Stores, proxy: RegistryProxy
) -> None:
    IMAGE.push(registry.url, repository, "1")
    name = f"{proxy.authority}/{repository}:1"
    images = images_of(stores, proxy.authority)
    first = await images.pull(name, ACCESS)
    seen = len(proxy.seen)
    assert not (await images.pull(name, ACCESS, policy="missing")).pulled
    assert len(proxy.seen) == seen

    async def down(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    proxy.faults.append(down)
    again = await images.pull(name, ACCESS)
    assert (again.image.digest, again.pulled) == (first.image.digest, False)
    assert "image of the last pull" in again.note
    with pytest.raises(RegistryError):
        await images.pull(f"{proxy.authority}/{repository}:2", ACCESS)


async def test_a_tag_is_resolved_again_when_it_is_pulled_again(
    registry: RegistryServer, repository: str, stores: Stores, proxy: RegistryProxy
) -> None:
    IMAGE.push(registry.url, repository, "1")
    name = f"{proxy.authority}/{repository}:1"
    images = images_of(stores, proxy.authority)
    first = await images.pull(name, ACCESS)
    assert not (await images.pull(name, ACCESS)).pulled
    other = TestImage(layers=[BASE, tar({"new": b"new"})])
    other.push(registry.url, repository, "1")
    assert (await images.pull(name, ACCESS, policy="missing")).image.digest == first.image.digest
    second = await images.pull(name, ACCESS)
    assert second.image.digest == sha256(other.config_blob)
    assert (await images.pull(name, ACCESS, policy="missing")).image.digest == second.image.digest
    # The base is shared.
    assert proxy.count("GET", f"/blobs/{sha256(other.blobs[0])}") == 1


async def test_the_image_of_this_platform_is_pulled(
    registry: RegistryServer, repository: str, stores: Stores
) -> None:
    foreign = TestImage(layers=[tar({"other": b"x"})], architecture="s390x")
    digest = push_index(registry.url, repository, "1", [foreign, IMAGE])
    push_index(registry.url, repository, "foreign", [foreign])
    foreign.push(registry.url, repository, "single")
    name = f"{registry.authority}/{repository}"
    images = images_of(stores, registry.authority)
    assert (await images.pull(f"{name}:1", ACCESS)).image.digest == sha256(IMAGE.config_blob)
    # The index's digest is pinned by users, and the manifest's by us.
    assert not (await images.pull(f"{name}@{digest}", ACCESS)).pulled
    for tag in ("foreign", "single"):
        with pytest.raises(RegistryError, match="linux/s390x") as caught:
            await images.pull(f"{name}:{tag}", ACCESS)
        assert caught.value.reason == "platform"


async def test_parallel_pulls_of_one_image_download_it_once(
    registry: RegistryServer, repository: str, stores: Stores, proxy: RegistryProxy
) -> None:
    IMAGE.push(registry.url, repository, "1")
    IMAGE.push(registry.url, repository, "same")
    images = images_of(stores, proxy.authority)
    name = f"{proxy.authority}/{repository}"
    pulls = [images.pull(f"{name}:{tag}", ACCESS) for tag in ("1", "same", "1", "same")]
    results = await asyncio.gather(*pulls)
    assert len({one.image.digest for one in results}) == 1
    for blob in IMAGE.blobs:
        assert proxy.count("GET", sha256(blob)) == 1
    for tag in ("1", "same"):
        assert not (await images.pull(f"{name}:{tag}", ACCESS, policy="missing")).pulled


async def test_a_pull_goes_on_until_all_who_wait_for_it_are_cancelled(
    registry: RegistryServer, repository: str, stores: Stores, proxy: RegistryProxy
) -> None:
    IMAGE.push(registry.url, repository, "1")
    images = images_of(stores, proxy.authority)
    name = f"{proxy.authority}/{repository}:1"
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def stall(request: web.Request) -> web.StreamResponse | None:
        if sha256(IMAGE.blobs[1]) in request.path:
            reached.set()
            await go_on.wait()
        return None

    proxy.faults.append(stall)
    first, second = (asyncio.create_task(images.pull(name, ACCESS)) for _ in range(2))
    await reached.wait()
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.wait({first})
    go_on.set()
    assert (await second).pulled
    assert proxy.count("GET", sha256(IMAGE.blobs[1])) == 1


async def test_a_cancelled_pull_leaves_no_image_and_keeps_complete_layers(
    registry: RegistryServer, repository: str, stores: Stores, proxy: RegistryProxy
) -> None:
    IMAGE.push(registry.url, repository, "1")
    images = images_of(stores, proxy.authority)
    name = f"{proxy.authority}/{repository}:1"
    complete, stalled = asyncio.Event(), asyncio.Event()

    async def stall(request: web.Request) -> web.StreamResponse | None:
        if sha256(IMAGE.blobs[1]) in request.path:
            stalled.set()
            await asyncio.sleep(30)
        return None

    def progress(one: LayerProgress) -> None:
        if one.digest == sha256(IMAGE.blobs[0]) and one.state == "done":
            complete.set()

    proxy.faults.append(stall)
    pull = asyncio.create_task(images.pull(name, ACCESS, progress=progress))
    await asyncio.gather(complete.wait(), stalled.wait())
    pull.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await pull
    assert await stores.catalog.list() == []
    proxy.faults.clear()
    assert (await images.pull(name, ACCESS)).pulled
    # A layer that was complete is not sent again.
    assert proxy.count("GET", sha256(IMAGE.blobs[0])) == 1
    assert proxy.count("GET", sha256(IMAGE.blobs[1])) == 2


async def test_a_pull_has_a_deadline(
    registry: RegistryServer, repository: str, stores: Stores, proxy: RegistryProxy
) -> None:
    async def stall(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    proxy.faults.append(stall)
    images = images_of(stores, proxy.authority)
    with pytest.raises(DeadlineExceeded, match="pull"):
        await images.pull(f"{proxy.authority}/{repository}:1", ACCESS, timeout=0.2)


async def test_a_changed_byte_is_refused(
    registry: RegistryServer, repository: str, stores: Stores, proxy: RegistryProxy
) -> None:
    IMAGE.push(registry.url, repository, "1")
    blob = bytearray(IMAGE.blobs[1])
    blob[len(blob) // 2] ^= 1

    async def flip(request: web.Request) -> web.StreamResponse | None:
        return web.Response(body=bytes(blob)) if sha256(IMAGE.blobs[1]) in request.path else None

    proxy.faults.append(flip)
    images = images_of(stores, proxy.authority)
    name = f"{proxy.authority}/{repository}:1"
    with pytest.raises((RegistryError, ImageError)):
        await images.pull(name, ACCESS)
    assert await stores.catalog.list() == []
    proxy.faults.clear()
    assert (await images.pull(name, ACCESS)).pulled


async def test_mirrors_are_tried_first_and_the_registry_when_they_fail(
    registry: RegistryServer, repository: str, stores: Stores, proxy: RegistryProxy
) -> None:
    IMAGE.push(registry.url, f"library/{repository.replace('/', '-')}", "1")
    short = repository.replace("/", "-")
    settings = plain(proxy.authority, registry.authority)
    registries = {
        **settings.registries,
        "docker.io": RegistryConfig(mirrors=(proxy.authority, registry.authority)),
    }
    images = RegistryImages(replace(settings, registries=registries), stores.catalog)

    async def fail(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=404)

    proxy.faults.append(fail)
    result = await images.pull(f"{short}:1", ACCESS)
    assert result.reference.startswith(f"docker.io/library/{short}@sha256:")
    assert proxy.seen


async def test_the_credentials_of_the_caller_are_for_one_registry(
    password_registry: RegistryServer, registry: RegistryServer, repository: str, stores: Stores
) -> None:
    known = Credentials(username=USER, password=PASSWORD)
    await push_with_password(IMAGE, password_registry.authority, repository, known)
    images = images_of(stores, password_registry.authority)
    name = f"{password_registry.authority}/{repository}:1"
    other = replace(ALICE, credentials={"docker.io": known})
    with pytest.raises(RegistryError, match="asks for credentials"):
        await images.pull(name, other)
    own = replace(ALICE, credentials={password_registry.authority: known})
    assert (await images.pull(name, own)).pulled
    # Used for one pull, and not stored: the image can be used without them, and no other.
    assert not (await images.pull(name, ALICE, policy="missing")).pulled
    with pytest.raises(RegistryError, match="asks for credentials"):
        await images.pull(f"{name}2", ALICE)


async def test_the_servers_own_credentials_are_used_only_where_allowed(
    password_registry: RegistryServer, repository: str, stores: Stores, tmp_path: Path
) -> None:
    known = Credentials(username=USER, password=PASSWORD)
    await push_with_password(IMAGE, password_registry.authority, repository, known)
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    config = RegistryConfig(plain_http=True, username=USER, password_file=str(file))
    settings = replace(plain(), registries={password_registry.authority: config})
    images = RegistryImages(settings, stores.catalog)
    name = f"{password_registry.authority}/{repository}:1"
    with pytest.raises(RegistryError, match="asks for credentials"):
        await images.pull(name, BOB)
    assert (await images.pull(name, replace(ALICE, server_credentials=True))).pulled
    file.unlink()
    with pytest.raises(RegistryError, match="password") as caught:
        await images.pull(name, replace(BOB, server_credentials=True))
    assert str(file) not in str(caught.value)


async def test_a_cached_image_is_for_scopes_that_could_pull_it(
    password_registry: RegistryServer, repository: str, stores: Stores
) -> None:
    known = Credentials(username=USER, password=PASSWORD)
    await push_with_password(IMAGE, password_registry.authority, repository, known)
    images = images_of(stores, password_registry.authority)
    name = f"{password_registry.authority}/{repository}:1"
    own = {password_registry.authority: known}
    pulled = await images.pull(name, replace(ALICE, credentials=own))
    for reference in (name, pulled.reference):
        assert (await images.pull(reference, ALICE, policy="missing")).image == pulled.image
        with pytest.raises(RegistryError, match="asks for credentials"):
            await images.pull(reference, BOB, policy="missing")
        assert await images.find(reference, BOB.scope) is None
    layers: list[LayerProgress] = []
    await images.pull(name, replace(BOB, credentials=own), progress=layers.append)
    # The registry vouches for the layers, so they are not sent again.
    assert {one.state for one in layers} == {"waiting", "present"}
    assert await images.find(name, BOB.scope) is not None


async def test_a_digest_alone_gives_no_access_to_the_layers_of_others(
    registry: RegistryServer, password_registry: RegistryServer, repository: str, stores: Stores
) -> None:
    """A tenant's own registry says that its image has the layers of another tenant's."""
    known = Credentials(username=USER, password=PASSWORD)
    secret = TestImage(layers=[tar({"secret": DATA[:1000]})])
    await push_with_password(secret, password_registry.authority, repository, known)
    own = {password_registry.authority: known}
    async with RegistryProxy(None).open() as hostile:
        images = images_of(stores, password_registry.authority, hostile.authority)
        name = f"{password_registry.authority}/{repository}:1"
        await images.pull(name, replace(ALICE, credentials=own))

        async def lie(request: web.Request) -> web.StreamResponse:
            if "/manifests/" in request.path:
                return web.Response(body=secret.manifest, content_type=secret.media_type)
            if sha256(secret.config_blob) in request.path:
                return web.Response(body=secret.config_blob)
            return web.Response(body=b"x" * len(secret.blobs[0]))

        hostile.faults.append(lie)
        stolen = f"{hostile.authority}/stolen:1"
        with pytest.raises(RegistryError) as caught:
            await images.pull(stolen, BOB)
        assert caught.value.reason == "digest"
        assert await images.find(stolen, BOB.scope) is None
        # With a layer of its own, whose configuration names the content of the other.
        fake = tar({"secret": b"guess"})
        mixed = TestImage(layers=[fake])
        config = mixed.config_blob.replace(sha256(fake).encode(), sha256(secret.layers[0]).encode())

        async def mix(request: web.Request) -> web.StreamResponse:
            if "/manifests/" in request.path:
                manifest = mixed.manifest.replace(
                    sha256(mixed.config_blob).encode(), sha256(config).encode()
                )
                return web.Response(body=manifest, content_type=mixed.media_type)
            if sha256(config) in request.path:
                return web.Response(body=config)
            return web.Response(body=mixed.blobs[0])

        hostile.faults[:] = [mix]
        with pytest.raises(ImageError) as refused:
            await images.pull(stolen, BOB)
        assert refused.value.reason == "mismatch"
        assert await images.find(stolen, BOB.scope) is None


async def test_what_the_operator_shares_is_for_all(
    registry: RegistryServer, repository: str, stores: Stores
) -> None:
    IMAGE.push(registry.url, repository, "1")
    images = images_of(stores, registry.authority)
    name = f"{registry.authority}/{repository}:1"
    await images.pull(name, replace(ACCESS, scope=""))
    assert await images.find(name, BOB.scope) is not None


async def test_a_truncated_layer_leaves_nothing(
    registry: RegistryServer,
    repository: str,
    stores: Stores,
    proxy: RegistryProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("smokebox.engine.images.registry.client._MAX_PAUSE", 0.01)
    IMAGE.push(registry.url, repository, "1")

    async def truncate(request: web.Request) -> web.StreamResponse | None:
        if sha256(IMAGE.blobs[1]) not in request.path:
            return None
        return await cut_off(request, IMAGE.blobs[1], 1000)

    proxy.faults.append(truncate)
    images = images_of(stores, proxy.authority)
    with pytest.raises(RegistryError, match="broke off") as caught:
        await images.pull(f"{proxy.authority}/{repository}:1", ACCESS)
    assert caught.value.retryable
    assert await stores.catalog.list() == []


async def test_unknown_images_and_bad_names_are_typed_errors(
    registry: RegistryServer, repository: str, stores: Stores
) -> None:
    images = images_of(stores, registry.authority)
    with pytest.raises(NotFound) as caught:
        await images.pull(f"{registry.authority}/{repository}:none", ACCESS)
    assert caught.value.kind == "image"
    with pytest.raises(SmokeboxError, match="upper-case"):
        await images.pull(f"{registry.authority}/Team/app", ACCESS)
