"""Registries that break connections, change bytes, stall, redirect and refuse."""

from __future__ import annotations

import asyncio
import hashlib
import random
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from engine.images.registry.access_to import client_of
from oci_images import TestImage, sha256, tar
from registry_server import RegistryProxy, RegistryServer, cut_off
from smokebox.engine.images.registry import transport as transport_module
from smokebox.engine.images.registry.access import Credentials
from smokebox.engine.images.registry.manifests import MAX_MANIFEST, Descriptor, parse_manifest
from smokebox.errors import NotFound, RegistryError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.engine.images.registry.client import RegistryClient

CONTENT = random.Random(1).randbytes(3 << 20)
IMAGE = TestImage(layers=[tar({"data": CONTENT})])
BLOB = IMAGE.blobs[0]
LAYER = Descriptor("application/vnd.oci.image.layer.v1.tar+gzip", sha256(BLOB), len(BLOB))


async def layer_of(client: RegistryClient) -> bytes:
    data = b"".join([piece async for piece in client.stream(LAYER)])
    assert len(data) == len(BLOB)
    return data


def on_blob(
    respond: Callable[[web.Request], Awaitable[web.StreamResponse | None]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse | None]]:
    """Return a fault that is for the layer only."""

    async def fault(request: web.Request) -> web.StreamResponse | None:
        return await respond(request) if LAYER.digest in request.path else None

    return fault


async def test_a_blob_is_continued_where_the_connection_broke(
    registry: RegistryServer, repository: str, proxy: RegistryProxy
) -> None:
    IMAGE.push(registry.url, repository, "1")
    cuts = [1_000_000, 700_000, 500_000]

    async def cut(request: web.Request) -> web.StreamResponse | None:
        if not cuts:
            return None
        _, headers, data = await proxy.fetch(request)
        kept = {k: v for k, v in headers.items() if k == "Content-Range"}
        response = web.StreamResponse(status=206 if kept else 200, headers=kept)
        response.content_length = len(data)
        await response.prepare(request)
        await response.write(data[: cuts.pop(0)])
        assert request.transport is not None
        request.transport.close()
        return response

    proxy.faults.append(on_blob(cut))
    async with client_of(proxy.authority, repository) as client:
        assert await layer_of(client) == BLOB
    ranges = [one.get("range") for one in proxy.headers if "range" in one]
    assert len(ranges) == 3
    assert ranges == sorted(ranges, key=lambda one: int(str(one)[6:-1]))


async def test_a_server_without_ranges_is_read_from_the_start(
    registry: RegistryServer, repository: str, proxy: RegistryProxy
) -> None:
    IMAGE.push(registry.url, repository, "1")
    served = 0

    async def no_ranges(request: web.Request) -> web.StreamResponse:
        nonlocal served
        served += 1
        if served == 1:
            return await cut_off(request, BLOB, 1_500_000)
        return web.Response(body=BLOB)

    proxy.faults.append(on_blob(no_ranges))
    async with client_of(proxy.authority, repository) as client:
        assert await layer_of(client) == BLOB
    assert served == 2


async def test_a_connection_that_breaks_each_time_is_given_up(
    registry: RegistryServer, repository: str, proxy: RegistryProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smokebox.engine.images.registry.client._MAX_PAUSE", 0.01)
    IMAGE.push(registry.url, repository, "1")
    proxy.faults.append(on_blob(lambda request: cut_off(request, BLOB, 0)))
    async with client_of(proxy.authority, repository) as client:
        with pytest.raises(RegistryError, match="broke off") as caught:
            await layer_of(client)
    assert caught.value.retryable
    assert proxy.count("GET", LAYER.digest) == 6


@pytest.mark.parametrize("change", [-1, 1], ids=["shorter", "longer"])
async def test_a_blob_of_another_size_is_refused(
    registry: RegistryServer, repository: str, proxy: RegistryProxy, change: int
) -> None:
    async def other(request: web.Request) -> web.StreamResponse:
        return web.Response(body=BLOB[:-1] if change < 0 else BLOB + b"x")

    proxy.faults.append(on_blob(other))
    async with client_of(proxy.authority, repository) as client:
        with pytest.raises(RegistryError, match="that is not sha256") as caught:
            await layer_of(client)
    assert caught.value.reason == "digest"
    assert proxy.count("GET", LAYER.digest) == 1


async def test_a_missing_blob_is_named(
    registry: RegistryServer, repository: str, proxy: RegistryProxy
) -> None:
    async with client_of(proxy.authority, repository) as client:
        with pytest.raises(RegistryError, match="lacks a blob") as caught:
            await layer_of(client)
    assert not caught.value.retryable


async def test_a_changed_manifest_or_config_is_refused(
    registry: RegistryServer, repository: str, proxy: RegistryProxy
) -> None:
    digest = IMAGE.push(registry.url, repository, "1")

    async def flip(request: web.Request) -> web.StreamResponse | None:
        if "/manifests/" in request.path or sha256(IMAGE.config_blob) in request.path:
            _, headers, data = await proxy.fetch(request)
            kept = {
                k: v for k, v in headers.items() if k in ("Content-Type", "Docker-Content-Digest")
            }
            return web.Response(
                body=data.replace(b'"os"', b'"oS"').replace(b"2", b"3"), headers=kept
            )
        return None

    async with client_of(proxy.authority, repository) as client:
        manifest = parse_manifest(await client.manifest("1"), client.image)
        proxy.faults.append(flip)
        # By its digest, and by a tag with the digest that the registry promised.
        for target in (digest, "1"):
            with pytest.raises(RegistryError, match=digest) as caught:
                await client.manifest(target)
            assert caught.value.reason == "digest"
        with pytest.raises(RegistryError) as caught:
            await client.blob(manifest.config, 1 << 20)
        assert caught.value.reason == "digest"


async def test_documents_without_end_are_refused(
    registry: RegistryServer, repository: str, proxy: RegistryProxy
) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)
            sent += 65536

    proxy.faults.append(endless)
    async with client_of(proxy.authority, repository) as client:
        with pytest.raises(RegistryError, match="longer than"):
            await client.manifest("1")
    assert sent < 3 * MAX_MANIFEST


async def test_a_redirect_to_another_host_gets_no_credentials(
    registry: RegistryServer, repository: str, proxy: RegistryProxy
) -> None:
    IMAGE.push(registry.url, repository, "1")
    async with RegistryProxy(None).open() as store:

        async def serve_blob(request: web.Request) -> web.StreamResponse:
            return web.Response(body=BLOB)

        async def redirect(request: web.Request) -> web.StreamResponse:
            if "authorization" not in request.headers:
                challenge = {"www-authenticate": 'Basic realm="x"'}
                return web.Response(status=401, headers=challenge)
            location = f"http://{store.authority}/blob?signature=a%2Fb"
            return web.Response(status=307, headers={"location": location})

        store.faults.append(serve_blob)
        proxy.faults.append(redirect)
        known = Credentials(username="me", password="s3cret")
        async with client_of(
            proxy.authority, repository, credentials=known, also_plain=(store.authority,)
        ) as client:
            assert await layer_of(client) == BLOB
    assert "authorization" in proxy.headers[-1]
    assert store.seen == [("GET", "/blob?signature=a%2Fb")]
    assert "authorization" not in store.headers[0]


@pytest.mark.parametrize("location", ["/v2/again", "ftp://example.com/", "", "http://[::"])
async def test_redirects_without_end_and_to_nowhere_are_refused(
    registry: RegistryServer, repository: str, proxy: RegistryProxy, location: str
) -> None:
    async def redirect(request: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={"location": location})

    proxy.faults.append(redirect)
    async with client_of(proxy.authority, repository) as client:
        with pytest.raises(RegistryError, match="redirects") as caught:
            await client.manifest("1")
    assert not caught.value.retryable
    assert len(proxy.seen) <= 6


async def test_a_failing_registry_is_asked_again(
    registry: RegistryServer, repository: str, proxy: RegistryProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smokebox.engine.images.registry.client._MAX_PAUSE", 0.01)
    IMAGE.push(registry.url, repository, "1")
    statuses = [500, 503]

    async def fail(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=statuses.pop()) if statuses else None

    proxy.faults.append(fail)
    async with client_of(proxy.authority, repository) as client:
        assert (await client.manifest("1")).data == IMAGE.manifest
        statuses += [502] * 100
        with pytest.raises(RegistryError, match="HTTP 502") as caught:
            await client.manifest("1")
    assert caught.value.reason == "network"
    assert len(statuses) == 96


@pytest.mark.parametrize(
    ("status", "reason"), [(401, "authentication"), (403, "denied"), (429, "rate_limit")]
)
async def test_refusals_are_typed_and_not_repeated(
    registry: RegistryServer, repository: str, proxy: RegistryProxy, status: int, reason: str
) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        body = {"errors": [{"code": "TOOMANYREQUESTS", "message": "s3cret"}]}
        return web.json_response(body, status=status, headers={"retry-after": "3600"})

    proxy.faults.append(refuse)
    async with client_of(proxy.authority, repository) as client:
        with pytest.raises(RegistryError, match=f"HTTP {status}, TOOMANYREQUESTS") as caught:
            await client.manifest("1")
    assert caught.value.reason == reason
    assert caught.value.hint
    assert "s3cret" not in str(caught.value)
    assert len(proxy.seen) == 1
    if status == 429:
        assert (caught.value.retry_after, caught.value.retryable) == (3600.0, True)
        assert "Try again after 3600 s" in caught.value.hint


async def test_a_short_rate_limit_is_waited_for(
    registry: RegistryServer, repository: str, proxy: RegistryProxy
) -> None:
    IMAGE.push(registry.url, repository, "1")
    limited = [1]

    async def limit(request: web.Request) -> web.StreamResponse | None:
        if limited:
            limited.pop()
            return web.Response(status=429, headers={"retry-after": "1"})
        return None

    proxy.faults.append(limit)
    async with client_of(proxy.authority, repository) as client:
        started = asyncio.get_running_loop().time()
        assert (await client.manifest("1")).data == IMAGE.manifest
    assert asyncio.get_running_loop().time() - started >= 1


async def test_a_silent_registry_has_a_deadline(
    registry: RegistryServer, repository: str, proxy: RegistryProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smokebox.engine.images.registry.client._MAX_PAUSE", 0.01)

    async def stall(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    proxy.faults.append(stall)
    async with client_of(proxy.authority, repository, silence=0.2) as client:
        with pytest.raises(RegistryError, match="does not respond") as caught:
            await client.manifest("1")
    assert caught.value.reason == "network"


async def test_a_registry_that_drips_has_a_deadline(
    registry: RegistryServer, repository: str, proxy: RegistryProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smokebox.engine.images.registry.client._MAX_PAUSE", 0.01)
    monkeypatch.setattr(transport_module, "DOCUMENT_SECONDS", 0.3)

    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.02)

    proxy.faults.append(drip)
    async with client_of(proxy.authority, repository) as client:
        with pytest.raises(RegistryError, match=r"more than 0\.3 s"):
            await client.manifest("1")


async def test_a_registry_that_is_down_is_explained(repository: str) -> None:
    async with client_of("127.0.0.1:1", repository) as client:
        with pytest.raises(RegistryError, match="refuses connections") as caught:
            await client.has_manifest("1")
    assert caught.value.retryable
    async with client_of("registry.invalid", repository) as client:
        with pytest.raises(RegistryError, match="is not known"):
            await client.has_manifest("1")


async def test_unknown_parts_do_not_become_an_image(
    registry: RegistryServer, repository: str, proxy: RegistryProxy
) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>login</html>", content_type="text/html")

    async with client_of(proxy.authority, repository) as client:
        with pytest.raises(NotFound):
            await client.manifest("1")
        proxy.faults.append(page)
        document = await client.manifest("1")
        with pytest.raises(RegistryError, match="is not valid"):
            parse_manifest(document, client.image)
    assert document.digest == f"sha256:{hashlib.sha256(document.data).hexdigest()}"
