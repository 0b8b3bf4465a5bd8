"""Manifests and blobs of real registries, with each kind of authorization."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING

import pytest

from engine.images.registry.access_to import LOOPBACK, client_of, plain
from oci_images import OCI_MANIFEST, TestImage, push_index, sha256, tar
from registry_server import PASSWORD, USER, RegistryServer, TokenServer, run_registry
from smokebox.engine.images.platforms import Platform, host_platform
from smokebox.engine.images.registry.access import Credentials, RegistryAccess
from smokebox.engine.images.registry.auth import parse_challenges
from smokebox.engine.images.registry.client import RegistryClient
from smokebox.engine.images.registry.manifests import (
    RegistryDocument,
    check_platform,
    is_index,
    parse_manifest,
    select_platform,
)
from smokebox.engine.images.registry.reference import parse_reference
from smokebox.engine.images.registry.transport import RegistryTransport
from smokebox.engine.images.registry.upload import RepositoryUpload
from smokebox.errors import Forbidden, NotFound, RegistryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

IMAGE = TestImage(layers=[tar({"bin/hello": b"hello"})])


async def upload(client: RegistryClient, image: TestImage, tag: str = "1") -> None:
    target = RepositoryUpload(client)
    for blob in (*image.blobs, image.config_blob):

        async def content(blob: bytes = blob) -> AsyncIterator[bytes]:
            yield blob[:7]
            yield blob[7:]

        await target.put_blob(sha256(blob), len(blob), content)
    await target.put_manifest(tag, image.media_type, image.manifest)


@pytest.mark.parametrize("docker", [False, True], ids=["oci", "docker"])
async def test_a_manifest_and_its_blobs_are_read(
    registry: RegistryServer, repository: str, docker: bool
) -> None:
    image = TestImage(layers=IMAGE.layers, docker=docker)
    digest = image.push(registry.url, repository, "1")
    async with client_of(registry.authority, repository) as client:
        document = await client.manifest("1")
        assert (document.digest, document.data) == (digest, image.manifest)
        assert document == await client.manifest(digest)
        manifest = parse_manifest(document, client.image)
        assert await client.blob(manifest.config, 1 << 20) == image.config_blob
        layer = b"".join([piece async for piece in client.stream(manifest.layers[0])])
    assert layer == image.blobs[0]


@pytest.mark.parametrize("docker", [False, True], ids=["oci", "docker"])
async def test_the_platform_of_this_machine_is_taken_from_an_index(
    registry: RegistryServer, repository: str, docker: bool
) -> None:
    other = "s390x"
    images = [TestImage(layers=IMAGE.layers, architecture=other, docker=docker), IMAGE]
    push_index(registry.url, repository, "1", images, docker=docker)
    async with client_of(registry.authority, repository) as client:
        index = await client.manifest("1")
        assert is_index(index, "it")
        chosen = select_platform(index, host_platform(), "it")
        assert chosen.digest == sha256(IMAGE.manifest)
        with pytest.raises(RegistryError, match=r"it is for linux/.*, linux/s390x") as caught:
            select_platform(index, Platform("linux", "riscv64"), "it")
    assert caught.value.reason == "platform"


async def test_an_unknown_image_is_not_found(registry: RegistryServer, repository: str) -> None:
    async with client_of(registry.authority, repository) as client:
        with pytest.raises(NotFound, match=f"{repository}:1") as caught:
            await client.manifest("missing")
        assert not await client.has_manifest("missing")
    assert caught.value.kind == "image"


async def test_a_password_is_sent_once_the_registry_asks(
    password_registry: RegistryServer, repository: str
) -> None:
    known = Credentials(username=USER, password=PASSWORD)
    async with client_of(password_registry.authority, repository, credentials=known) as client:
        await upload(client, IMAGE)
        assert (await client.manifest("1")).data == IMAGE.manifest


async def test_missing_and_wrong_passwords_are_refused_without_showing_them(
    password_registry: RegistryServer, repository: str
) -> None:
    async with client_of(password_registry.authority, repository) as client:
        with pytest.raises(RegistryError, match="asks for credentials") as caught:
            await client.manifest("1")
    assert caught.value.reason == "authentication"
    assert f"docker login {password_registry.authority}" in caught.value.hint
    wrong = Credentials(username=USER, password="wr0ng")
    async with client_of(password_registry.authority, repository, credentials=wrong) as client:
        with pytest.raises(RegistryError, match="refuses the credentials") as caught:
            await client.manifest("1")
    assert "wr0ng" not in f"{caught.value!r}{caught.value}{caught.value.fields}{wrong!r}"


async def test_a_token_is_fetched_for_the_scope_of_the_request(
    tmp_path: Path, repository: str
) -> None:
    tokens = TokenServer(tmp_path)
    tokens.requires = (USER, PASSWORD)
    known = Credentials(username=USER, password=PASSWORD)
    with run_registry(tmp_path / "registry", tokens.auth) as registry:
        also = f"127.0.0.1:{tokens.port}"
        async with (
            tokens.open(),
            client_of(
                registry.authority, repository, credentials=known, also_plain=(also,)
            ) as client,
        ):
            await upload(client, IMAGE)
            assert (await client.manifest("1")).data == IMAGE.manifest
            scopes = [one["scope"] for one in tokens.seen]
            assert scopes == [f"repository:{repository}:pull,push", f"repository:{repository}:pull"]
            assert {one["service"] for one in tokens.seen} == {"test-registry"}
            assert {one["account"] for one in tokens.seen} == {USER}


async def test_an_identity_token_is_exchanged(tmp_path: Path, repository: str) -> None:
    tokens = TokenServer(tmp_path)
    tokens.requires, tokens.identity_tokens = (USER, PASSWORD), {"identity"}
    known = Credentials(identity_token="identity")
    with run_registry(tmp_path / "registry", tokens.auth) as registry:
        also = f"127.0.0.1:{tokens.port}"
        async with (
            tokens.open(),
            client_of(
                registry.authority, repository, credentials=known, also_plain=(also,)
            ) as client,
        ):
            await upload(client, IMAGE)
            assert tokens.seen[0]["grant_type"] == "refresh_token"
            assert tokens.seen[0]["authorization"] == ""
            assert "identity" not in repr(known)


async def test_the_token_server_refuses_wrong_credentials(tmp_path: Path, repository: str) -> None:
    tokens = TokenServer(tmp_path)
    tokens.requires = (USER, PASSWORD)
    known = Credentials(username=USER, password="wr0ng")
    with run_registry(tmp_path / "registry", tokens.auth) as registry:
        also = f"127.0.0.1:{tokens.port}"
        async with (
            tokens.open(),
            client_of(
                registry.authority, repository, credentials=known, also_plain=(also,)
            ) as client,
        ):
            with pytest.raises(RegistryError, match="refuses these credentials") as caught:
                await client.manifest("1")
            assert caught.value.reason == "authentication"
            assert "wr0ng" not in str(caught.value)
            tokens.failing = 429
            with pytest.raises(RegistryError) as caught:
                await client.manifest("1")
            assert (caught.value.reason, caught.value.retry_after) == ("rate_limit", 70.0)


async def test_a_token_that_expired_is_replaced(tmp_path: Path, repository: str) -> None:
    tokens = TokenServer(tmp_path)
    # The registry allows a minute of clock skew.
    tokens.seconds = -120
    with run_registry(tmp_path / "registry", tokens.auth) as registry:
        also = f"127.0.0.1:{tokens.port}"
        async with (
            tokens.open(),
            client_of(registry.authority, repository, also_plain=(also,)) as client,
        ):
            with pytest.raises(RegistryError):
                await client.manifest("1")
            before = len(tokens.seen)
            tokens.seconds = 300
            with pytest.raises(NotFound):
                await client.manifest("1")
            assert len(tokens.seen) == before + 1


async def test_the_hosts_of_tokens_need_their_own_permission(
    tmp_path: Path, repository: str
) -> None:
    tokens = TokenServer(tmp_path)
    with run_registry(tmp_path / "registry", tokens.auth) as registry:
        async with tokens.open(), client_of(registry.authority, repository) as client:
            with pytest.raises(RegistryError, match="without TLS") as caught:
                await client.manifest("1")
        assert "plain_http = true" in caught.value.hint
        assert not tokens.seen


async def test_private_addresses_and_hosts_above_a_ceiling_are_refused(
    registry: RegistryServer, repository: str
) -> None:
    async with client_of(registry.authority, repository, access=RegistryAccess()) as client:
        with pytest.raises(Forbidden, match="public address"):
            await client.manifest("1")

    def refuse(host: str) -> None:
        raise Forbidden(f"not {host}")

    access = RegistryAccess(private=LOOPBACK, check_host=refuse)
    async with client_of(registry.authority, repository, access=access) as client:
        with pytest.raises(Forbidden, match=r"not 127\.0\.0\.1"):
            await client.manifest("1")


async def test_plain_http_is_used_only_where_it_is_configured(registry: RegistryServer) -> None:
    transport = RegistryTransport(plain(), RegistryAccess(private=LOOPBACK))
    client = RegistryClient(transport, parse_reference(f"{registry.authority}/app"))
    with pytest.raises(RegistryError, match="TLS") as caught:
        await client.manifest("1")
    assert "plain_http" in caught.value.hint
    transport.close()


async def test_a_blob_is_uploaded_only_where_it_lacks(
    registry: RegistryServer, repository: str
) -> None:
    data = secrets.token_bytes(100_000)
    async with client_of(registry.authority, repository) as client:
        target = RepositoryUpload(client)
        assert not await target.has_blob(sha256(data))

        async def content() -> AsyncIterator[bytes]:
            yield data

        await target.put_blob(sha256(data), len(data), content)
        assert await target.has_blob(sha256(data))
        with pytest.raises(RegistryError):
            await target.put_blob(sha256(b"other"), len(data), content)
    async with client_of(registry.authority, f"{repository}-copy") as client:
        other = RepositoryUpload(client)
        assert await other.mount_blob(sha256(data), repository)
        assert await other.has_blob(sha256(data))
        assert not await other.mount_blob(sha256(b"missing"), repository)


def manifest(**fields: object) -> RegistryDocument:
    document = {**json.loads(IMAGE.manifest), **fields}
    return RegistryDocument(OCI_MANIFEST, json.dumps(document).encode())


LAYER = {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": sha256(b""), "size": 0}
FOREIGN = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (RegistryDocument("", b"<html>"), "is not valid"),
        (RegistryDocument("", b"[" * 100_000), "is not valid"),
        (RegistryDocument("", b'{"schemaVersion": 1, "fsLayers": []}'), "schema 1"),
        (
            RegistryDocument("application/vnd.docker.distribution.manifest.v1+prettyjws", b"{}"),
            "schema 1",
        ),
        (manifest(manifests=[]), "neither one image nor an index"),
        (RegistryDocument("", b"{}"), "neither one image nor an index"),
        (manifest(mediaType="application/vnd.oci.image.index.v1+json"), "it says"),
        (manifest(layers=[]), "has 0 layers"),
        (manifest(layers=[LAYER] * 401), "has 401 layers"),
        (manifest(layers=[{**LAYER, "digest": "md5:1"}]), "not sha256"),
        (manifest(layers=[{**LAYER, "digest": "sha256:../../etc/passwd"}]), "not sha256"),
        (manifest(layers=[{**LAYER, "size": -1}]), "of -1 bytes"),
        (manifest(layers=[{**LAYER, "size": 1 << 60}]), "bytes"),
        (manifest(layers=[{**LAYER, "urls": ["http://169.254.169.254/"]}]), "foreign layer"),
        (manifest(layers=[{**LAYER, "mediaType": FOREIGN}]), "foreign layer"),
        (manifest(layers=[{**LAYER, "mediaType": "text/plain"}]), "unknown type"),
        (
            manifest(config={**LAYER, "mediaType": "application/vnd.cncf.helm.config.v1+json"}),
            "no con",
        ),
        (
            manifest(
                config={
                    "mediaType": "application/vnd.oci.image.config.v1+json",
                    "digest": sha256(b""),
                    "size": 9 << 20,
                }
            ),
            "a configuration of more than",
        ),
    ],
)
def test_hostile_and_foreign_manifests_are_refused(
    document: RegistryDocument, problem: str
) -> None:
    with pytest.raises(RegistryError, match=problem):
        is_index(document, "the image")
        parse_manifest(document, "the image")


def test_an_image_of_another_platform_is_refused() -> None:
    with pytest.raises(RegistryError, match="it is for linux/s390x") as caught:
        check_platform({"os": "linux", "architecture": "s390x"}, host_platform(), "the image")
    assert caught.value.reason == "platform"


@pytest.mark.parametrize(
    ("offered", "wanted", "chosen"),
    [
        (["amd64", "amd64/v3"], "amd64", 0),
        (["amd64/v3", "amd64"], "amd64", 1),
        (["arm64"], "arm64/v8", 0),
        (["arm/v5", "arm/v7", "arm/v6"], "arm/v7", 1),
        (["arm/v5", "arm/v6"], "arm/v7", 1),
        (["amd64/v3"], "amd64", None),
        (["arm/v7"], "arm/v6", None),
    ],
)
def test_a_variant_that_this_machine_can_run_is_chosen(
    offered: list[str], wanted: str, chosen: int | None
) -> None:
    manifests = []
    for number, name in enumerate(offered):
        architecture, _, variant = name.partition("/")
        platform = {"os": "linux", "architecture": architecture, "variant": variant}
        digest = sha256(str(number).encode())
        manifests.append(
            {"mediaType": OCI_MANIFEST, "digest": digest, "size": 1, "platform": platform}
        )
    index = RegistryDocument("", json.dumps({"manifests": manifests}).encode())
    architecture, _, variant = wanted.partition("/")
    platform_ = Platform("linux", architecture, variant)
    if chosen is None:
        with pytest.raises(RegistryError, match="not for"):
            select_platform(index, platform_, "it")
        return
    assert select_platform(index, platform_, "it").digest == sha256(str(chosen).encode())


def test_challenges_are_parsed() -> None:
    found = parse_challenges(
        [
            'Bearer realm="https://a.example/token",service="a, b",scope="repository:x:pull,push"',
            'Negotiate, Basic realm="say \\"hi\\"", Digest nonce=abc',
            "",
            '="',
        ]
    )
    assert [(one.scheme, one.parameters) for one in found] == [
        (
            "bearer",
            {
                "realm": "https://a.example/token",
                "service": "a, b",
                "scope": "repository:x:pull,push",
            },
        ),
        ("negotiate", {}),
        ("basic", {"realm": 'say "hi"'}),
        ("digest", {"nonce": "abc"}),
    ]
