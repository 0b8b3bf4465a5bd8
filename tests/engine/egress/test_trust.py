"""Installation of the authority in an image, and the programs that trust it."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from smokebox.egress.message import Response
from smokebox.engine.egress.authority import Authority
from smokebox.engine.egress.trust import BUNDLE, OWN, VARIABLES, install
from unprivileged import rerun_as_nobody

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.egress.handler import HandlerContext
    from smokebox.egress.message import Request
    from smokebox.engine.files.rooted_files import RootedFiles
    from smokebox.engine.host import Host

PEM = Authority.make("box").pem
JAVA = """
import java.net.*;
public class T {
    public static void main(String[] args) throws Exception {
        var in = URI.create("https://api.test/").toURL().openStream();
        System.out.print(new String(in.readAllBytes()));
    }
}
"""
PYTHON = "import urllib.request as r; print(r.urlopen('https://api.test/').read().decode(), end='')"
NODE = "fetch('https://api.test/').then(r => r.text()).then(t => process.stdout.write(t))"


async def greet(request: Request, env: object, context: HandlerContext) -> Response:
    return Response("hello")


def test_authority_is_added_once_to_every_bundle(root: Path, files: RootedFiles) -> None:
    bundles = [root / BUNDLE[1:], root / "etc/pki/tls/certs/ca-bundle.crt"]
    for bundle in bundles:
        bundle.parent.mkdir(parents=True)
        bundle.write_bytes(b"existing")
    for _ in range(2):
        install(files, PEM)
    assert [bundle.read_bytes() for bundle in bundles] == [b"existing\n" + PEM] * 2
    assert (root / OWN[1:]).read_bytes() == PEM


def test_missing_default_bundle_is_created_from_another(root: Path, files: RootedFiles) -> None:
    (root / "etc/ssl").mkdir(parents=True)
    (root / "etc/ssl/ca-bundle.pem").write_bytes(b"SUSE\n")
    install(files, PEM)
    assert (root / BUNDLE[1:]).read_bytes() == b"SUSE\n" + PEM


def test_empty_image_gets_all_files_that_the_variables_name(root: Path, files: RootedFiles) -> None:
    install(files, PEM)
    for path in set(VARIABLES.values()):
        assert PEM in (root / path[1:]).read_bytes()


def test_keystore_of_a_java_installation_is_updated_once(root: Path, files: RootedFiles) -> None:
    keystore = root / "opt/java/openjdk/lib/security/cacerts"
    keystore.parent.mkdir(parents=True)
    (root / "opt/java/a-file").touch()
    keystore.write_bytes(b"any keystore")
    install(files, PEM)
    installed = keystore.read_bytes()
    assert installed.startswith(b"\xfe\xed\xfe\xed")
    install(files, PEM)
    assert keystore.read_bytes() == installed


@pytest.mark.parametrize(
    "command",
    [
        ["curl", "-sS", "https://api.test/"],
        ["wget", "-qO-", "https://api.test/"],
        ["env", "-i", "PATH=/usr/bin:/bin", "curl", "-sS", "https://api.test/"],
        ["python3", "-c", PYTHON],
        ["node", "-e", NODE],
    ],
    ids=["curl", "wget", "curl-without-variables", "python", "node"],
)
async def test_programs_trust_the_proxy(host: Host, command: list[str]) -> None:
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    sandbox = await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    result = await sandbox.exec(command, timeout=15)
    assert result.stdout == "hello", result.stderr


@pytest.mark.timeout(60)
@pytest.mark.skipif(not shutil.which("java"), reason="Java is not installed")
async def test_java_trusts_the_proxy(host: Host) -> None:
    sandbox = await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    await sandbox.write_file("T.java", JAVA)
    result = await sandbox.exec(["java", "T.java"], timeout=45)
    assert result.stdout == "hello", result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.timeout(120)
def test_programs_trust_the_proxy_of_an_unprivileged_engine() -> None:
    rerun_as_nobody(__file__, "curl or python")
