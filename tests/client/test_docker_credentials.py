"""Credentials of `docker login` and of credential helpers are found, and never shown."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING

import pytest

from smokebox.client.docker_credentials import find_credentials, registry_of
from smokebox.errors import InvalidOption
from smokebox.wire.requests import RegistryCredentials

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Configure = Callable[[object], None]

REGISTRY = "images.example.com:5000"


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Return a function that writes Docker's configuration."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

    def write(config: object) -> None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text)

    return write


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that installs a credential helper of a shell script."""

    def install(script: str) -> None:
        path = tmp_path / "bin" / "docker-credential-test"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")

    return install


def auth(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


async def test_no_configuration_means_no_credentials(configure: Configure) -> None:
    assert await find_credentials(REGISTRY) is None
    configure({})
    assert await find_credentials(REGISTRY) is None
    configure({"auths": {REGISTRY: {}, "other.example.com": {"auth": auth("a", "b")}}})
    assert await find_credentials(REGISTRY) is None


@pytest.mark.parametrize("key", [REGISTRY, f"https://{REGISTRY}", f"https://{REGISTRY}/v2/"])
async def test_a_stored_password_is_found(configure: Configure, key: str) -> None:
    configure({"auths": {key: {"auth": auth("me", "pass:wörd")}}})
    assert await find_credentials(REGISTRY) == RegistryCredentials(
        registry=REGISTRY, username="me", password="pass:wörd"
    )


async def test_docker_hub_is_found_under_its_own_key(configure: Configure) -> None:
    configure({"auths": {"https://index.docker.io/v1/": {"auth": auth("me", "p")}}})
    found = await find_credentials(registry_of("python:3.12-slim"))
    assert found is not None
    assert (found.registry, found.password) == ("docker.io", "p")
    assert registry_of(f"{REGISTRY}/x") == REGISTRY


async def test_an_identity_token_is_found(configure: Configure) -> None:
    entry = {"auth": auth("00000000-0000-0000-0000-000000000000", ""), "identitytoken": "t"}
    configure({"auths": {REGISTRY: entry}})
    found = await find_credentials(REGISTRY)
    assert found is not None
    assert found.identity_token == "t"


@pytest.mark.parametrize("key", ["credsStore", "credHelpers"])
async def test_a_helper_is_run_with_the_name_of_the_registry(
    configure: Configure, helper: Callable[[str], None], tmp_path: Path, key: str
) -> None:
    configure({key: "test" if key == "credsStore" else {REGISTRY: "test"}})
    helper(
        f"cat > {tmp_path}/asked; echo $1 >> {tmp_path}/asked; "
        'echo \'{"ServerURL": "x", "Username": "me", "Secret": "s3cret"}\''
    )
    found = await find_credentials(REGISTRY)
    assert found == RegistryCredentials(registry=REGISTRY, username="me", password="s3cret")
    assert (tmp_path / "asked").read_text() == f"{REGISTRY}get\n"


async def test_a_helper_may_return_an_identity_token_or_nothing(
    configure: Configure, helper: Callable[[str], None]
) -> None:
    configure({"credsStore": "test"})
    helper('cat > /dev/null; echo \'{"Username": "<token>", "Secret": "t"}\'')
    found = await find_credentials(REGISTRY)
    assert found == RegistryCredentials(registry=REGISTRY, identity_token="t")
    helper("cat > /dev/null; echo 'credentials not found in native keychain'; exit 1")
    assert await find_credentials(REGISTRY) is None


@pytest.mark.parametrize(
    ("config", "script", "problem"),
    [
        ("{", "", "is not JSON"),
        ("[]", "", "not a JSON object"),
        ({"auths": {REGISTRY: {"auth": "s3cret!"}}}, "", "is not base64"),
        ({"credsStore": "missing"}, "", "is not installed"),
        ({"credsStore": "../../bin/sh"}, "", "is not installed"),
        ({"credsStore": "test"}, "cat > /dev/null; echo s3cret; exit 1", "failed"),
        ({"credsStore": "test"}, "cat > /dev/null; echo s3cret", "did not print"),
        ({"credsStore": "test"}, "cat > /dev/null; echo '{\"Secret\": 1}'", "did not print"),
    ],
)
async def test_what_is_damaged_is_named_without_secrets(
    configure: Configure,
    helper: Callable[[str], None],
    config: object,
    script: str,
    problem: str,
) -> None:
    configure(config)
    if script:
        helper(script)
    with pytest.raises(InvalidOption, match=problem) as caught:
        await find_credentials(REGISTRY)
    assert "s3cret" not in str(caught.value)
    assert caught.value.hint


async def test_a_helper_has_a_deadline(
    configure: Configure, helper: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smokebox.client.docker_credentials._HELPER_SECONDS", 0.2)
    configure({"credsStore": "test"})
    helper("exec sleep 30")
    with pytest.raises(InvalidOption, match="does not respond"):
        await find_credentials(REGISTRY)
