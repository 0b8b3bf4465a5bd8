"""Registries with TLS: the authority of their certificates, and their passwords."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from engine.images.registry.access_to import LOOPBACK, plain
from oci_images import TestImage, tar
from registry_server import PASSWORD, USER, htpasswd_auth, run_registry, self_signed
from smokebox.engine.images.registry.access import Credentials, RegistryAccess
from smokebox.engine.images.registry.pull import RegistryImages
from smokebox.engine.images.registry.push import ImagePusher
from smokebox.errors import RegistryError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine.images.registry.conftest import Stores
    from registry_server import RegistryServer

ACCESS = RegistryAccess(private=LOOPBACK)
IMAGE = TestImage(layers=[tar({"etc": None, "etc/os": b"base"})])


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The certificate and key of a registry."""
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tls_registry(
    tmp_path_factory: pytest.TempPathFactory, tls: dict[str, str]
) -> Iterator[RegistryServer]:
    """A registry with TLS and a password."""
    directory = tmp_path_factory.mktemp("tls-registry")
    with run_registry(directory, htpasswd_auth(directory), tls=tls) as server:
        yield server


async def test_an_image_is_pushed_and_pulled_by_tls_with_a_password(
    registry: RegistryServer,
    tls_registry: RegistryServer,
    tls: dict[str, str],
    repository: str,
    stores: Stores,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", tls["certificate"])
    IMAGE.push(registry.url, repository, "1")
    images = RegistryImages(plain(registry.authority), stores.catalog)
    pulled = (await images.pull(f"{registry.authority}/{repository}:1", ACCESS)).image
    name = f"{tls_registry.authority}/{repository}:1"
    known = Credentials(username=USER, password=PASSWORD)
    access = replace(ACCESS, credentials={tls_registry.authority: known})
    pusher = ImagePusher(images, stores.catalog)
    with pytest.raises(RegistryError) as caught:
        await pusher.push(pulled, name, ACCESS)
    assert caught.value.reason == "authentication"
    pushed = await pusher.push(pulled, name, access)
    found = await images.pull(name, replace(access, scope="other-"))
    assert found.pulled
    assert found.reference.endswith(f"@{pushed.digest}")


@pytest.mark.parametrize("trusted", [False, True])
async def test_a_certificate_that_is_not_trusted_is_refused_with_the_next_step(
    tls_registry: RegistryServer,
    repository: str,
    stores: Stores,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trusted: bool,
) -> None:
    wrong_host = self_signed(tmp_path, "127.0.0.9")
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", wrong_host["certificate"])
    else:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    images = RegistryImages(plain(), stores.catalog)
    with pytest.raises(RegistryError, match=r"certificate of .* cannot be verified") as caught:
        await images.pull(f"{tls_registry.authority}/{repository}:1", ACCESS)
    assert "SSL_CERT_FILE" in caught.value.hint
    assert not caught.value.retryable
    with (
        run_registry(tmp_path / "wrong", tls=wrong_host) as server,
        pytest.raises(RegistryError, match="cannot be verified"),
    ):
        await images.pull(f"{server.authority}/{repository}:1", ACCESS)
