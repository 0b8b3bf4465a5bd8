"""`smokebox images`: pull, list, inspect, push, remove and prune, with the user's credentials."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cli.command_line import CommandLine
from oci_images import busybox, push_with_password
from registry_server import PASSWORD, USER, RegistryServer, htpasswd_auth, run_registry
from smokebox.engine.images.registry.access import Credentials

if TYPE_CHECKING:
    from collections.abc import Iterator

KNOWN = Credentials(username=USER, password=PASSWORD)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """A registry with a password, and an image in it."""
    directory = tmp_path_factory.mktemp("registry")
    with run_registry(directory, htpasswd_auth(directory)) as server:
        for name in ("team/box", "team/own"):
            image = replace(busybox(), config={"Env": ["GREETING=hi"], "Labels": {"name": name}})
            asyncio.run(push_with_password(image, server.authority, name, KNOWN))
        yield server


@pytest.fixture(scope="module")
def cli(
    tmp_path_factory: pytest.TempPathFactory, registry: RegistryServer
) -> Iterator[CommandLine]:
    """The command line with a server that may use the registry, and a stored login."""
    home = tmp_path_factory.mktemp("home")
    (home / "server.toml").write_text(f'[registries."{registry.authority}"]\nplain_http = true\n')
    docker = tmp_path_factory.mktemp("docker")
    entry = {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}
    (docker / "config.json").write_text(json.dumps({"auths": {registry.authority: entry}}))
    cli = CommandLine(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_CONFIG", str(docker))
        cli.output("up")
        yield cli
        cli.run("down")


def all_images(cli: CommandLine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cli.output("images", "ls", "--json"))
    return found


def test_an_image_is_pulled_listed_inspected_pushed_and_removed(
    cli: CommandLine, registry: RegistryServer
) -> None:
    name = f"{registry.authority}/team/own:1"
    pulled = cli.output("images", "pull", name).split()
    assert pulled[0].startswith(f"{registry.authority}/team/own@sha256:")
    assert pulled[-1] == "pulled"
    assert cli.output("images", "pull", name).strip().endswith("up to date")
    header, *rows = cli.output("images", "ls").splitlines()
    assert header.split() == ["IMAGE", "DIGEST", "LAYERS", "SIZE", "CREATED", "USED"]
    assert name in [row.split()[0] for row in rows]
    (listed,) = (one for one in all_images(cli) if name in one["names"])
    shown = cli.output("images", "inspect", name)
    assert listed["digest"] in shown
    assert "GREETING=hi" in shown
    pushed = cli.output("images", "push", name, f"{registry.authority}/team/copy:2").strip()
    assert pushed.startswith(f"{registry.authority}/team/copy:2@sha256:")
    done = json.loads(cli.output("images", "pull", "--json", pushed.replace(":2@", "@")))
    assert done[0]["reference"] == pushed.replace(":2@", "@")
    assert cli.output("images", "rm", name, done[0]["reference"]) == ""
    assert "team/own" not in str(all_images(cli))
    assert cli.output("images", "prune").startswith("Removed ")
    missing = cli.run("images", "rm", name)
    assert (missing.returncode, "has no image" in missing.stderr) == (1, True)


def test_creating_a_sandbox_pulls_a_private_image_with_the_stored_login(
    cli: CommandLine, registry: RegistryServer
) -> None:
    name = f"{registry.authority}/team/box:12"
    assert cli.output("create", "from-image", "--image", name) == "from-image\n"
    assert cli.output("exec", "from-image", "cat", "/motd") == "hello"


def test_credentials_of_the_command_line_come_from_standard_input(
    cli: CommandLine, registry: RegistryServer
) -> None:
    name = f"{registry.authority}/team/box:1"
    words = ("images", "pull", name, "--username", USER)
    refused = cli.run(*words)
    assert (refused.returncode, "--password-stdin" in refused.stderr) == (2, True)
    refused = cli.run(*words, "--password-stdin", stdin="wr0ng\n")
    assert (refused.returncode, "refuses the credentials" in refused.stderr) == (1, True)
    assert "wr0ng" not in refused.stderr
    assert cli.run(*words, "--password-stdin", stdin=f"{PASSWORD}\n").returncode == 0


def test_a_mistyped_reference_names_the_part(cli: CommandLine) -> None:
    done = cli.run("images", "pull", "Team/App:1")
    assert (done.returncode, "upper-case" in done.stderr) == (2, True)
