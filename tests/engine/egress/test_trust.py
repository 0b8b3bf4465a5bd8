"""Where a sandbox looks for whom to trust, in the images that there are."""

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
    public static void main(String[] words) throws Exception {
        var in = URI.create("https://api.test/").toURL().openStream();
        System.out.print(new String(in.readAllBytes()));
    }
}
"""
PYTHON = "import urllib.request as r; print(r.urlopen('https://api.test/').read().decode(), end='')"
NODE = "fetch('https://api.test/').then(r => r.text()).then(t => process.stdout.write(t))"


async def greet(request: Request, env: object, context: HandlerContext) -> Response:
    return Response("hello")


def test_it_is_added_to_every_bundle_that_there_is_and_once(root: Path, files: RootedFiles) -> None:
    bundles = [root / BUNDLE[1:], root / "etc/pki/tls/certs/ca-bundle.crt"]
    for bundle in bundles:
        bundle.parent.mkdir(parents=True)
        bundle.write_bytes(b"others")
    for _ in range(2):
        install(files, PEM)
    assert [bundle.read_bytes() for bundle in bundles] == [b"others\n" + PEM] * 2
    assert (root / OWN[1:]).read_bytes() == PEM


def test_where_there_is_no_bundle_one_is_made(root: Path, files: RootedFiles) -> None:
    (root / "etc/ssl").mkdir(parents=True)
    (root / "etc/ssl/ca-bundle.pem").write_bytes(b"SUSE\n")
    install(files, PEM)
    assert (root / BUNDLE[1:]).read_bytes() == b"SUSE\n" + PEM


def test_an_empty_image_gets_what_the_variables_name(root: Path, files: RootedFiles) -> None:
    install(files, PEM)
    for path in set(VARIABLES.values()):
        assert PEM in (root / path[1:]).read_bytes()


def test_a_java_of_its_own_is_found(root: Path, files: RootedFiles) -> None:
    (root / "opt/java/openjdk/lib/security").mkdir(parents=True)
    (root / "opt/java/a-file").touch()
    (root / "opt/java/openjdk/lib/security/cacerts").write_bytes(b"any keystore")
    install(files, PEM)
    first = (root / "opt/java/openjdk/lib/security/cacerts").read_bytes()
    assert first.startswith(b"\xfe\xed\xfe\xed")
    install(files, PEM)
    assert (root / "opt/java/openjdk/lib/security/cacerts").read_bytes() == first


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
async def test_programs_trust_what_they_are_shown(host: Host, command: list[str]) -> None:
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not on this machine")
    sandbox = await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    result = await sandbox.exec(command, timeout=15)
    assert result.stdout == "hello", result.stderr


@pytest.mark.timeout(60)
@pytest.mark.skipif(not shutil.which("java"), reason="Java is not on this machine")
async def test_java_trusts_what_it_is_shown(host: Host) -> None:
    sandbox = await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    await sandbox.write_file("T.java", JAVA)
    result = await sandbox.exec(["java", "T.java"], timeout=45)
    assert result.stdout == "hello", result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="this is an ordinary user")
@pytest.mark.timeout(120)
def test_the_same_by_an_ordinary_user() -> None:
    rerun_as_nobody(__file__, "curl or python")
