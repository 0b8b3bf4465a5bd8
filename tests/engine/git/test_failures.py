"""Failed clones: their errors, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from typing import TYPE_CHECKING

import pytest

from smokebox.errors import (
    DeadlineExceeded,
    GitError,
    InvalidOption,
    SandboxGone,
    SmokeboxError,
    StorageFull,
)

if TYPE_CHECKING:
    from pathlib import Path

    from engine.git.git_server import GitServer
    from smokebox.engine import Sandbox


@pytest.mark.parametrize(
    ("path", "reason", "message"),
    [
        ("plain/missing.git", "repository_not_found", "no repository at .*missing"),
        ("status/404/x.git", "repository_not_found", "HTTP 404"),
        ("status/410/x.git", "repository_not_found", "HTTP 410"),
        ("status/401/x.git", "authentication", "asks for credentials"),
        ("status/403/x.git", "authentication", "HTTP 403"),
        ("status/500/x.git", "network", "HTTP 500"),
        ("status/503/x.git", "network", "HTTP 503"),
        ("status/429/x.git", "network", "HTTP 429"),
        ("status/204/x.git", "failed", "HTTP 204"),
        ("page/x.git", "failed", "not respond as a git server"),
        ("loop/x.git", "failed", "redirects more than 5 times"),
        ("login/x.git", "failed", "not to a repository"),
        ("odd/x.git", "failed", "not http or https"),
        ("cut/large.git", "network", "broke off"),
    ],
)
async def test_bad_responses_have_a_reason(
    sandbox: Sandbox, server: GitServer, path: str, reason: str, message: str
) -> None:
    url = f"{server.origin}/{path}"
    with pytest.raises(GitError, match=message) as caught:
        await sandbox.git_checkout(url, "t", allow_private=True)
    assert (caught.value.reason, caught.value.url) == (reason, url)
    assert caught.value.retryable is (reason == "network")
    assert not await sandbox.exists("t")


async def test_missing_branch(sandbox: Sandbox, server: GitServer) -> None:
    url = f"{server.origin}/plain/project.git"
    with pytest.raises(GitError, match="no branch or tag 'nope'") as caught:
        await sandbox.git_checkout(url, branch="nope", allow_private=True)
    assert (caught.value.reason, caught.value.branch) == ("branch_not_found", "nope")
    assert not await sandbox.exists("project")


async def test_refused_connection(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(GitError, match="refuses connections") as caught:
        await sandbox.git_checkout(f"http://127.0.0.1:{port}/x.git", allow_private=True)
    assert (caught.value.reason, caught.value.retryable) == ("network", True)


@pytest.mark.parametrize("allow_private", [True, False])
async def test_unknown_host(sandbox: Sandbox, allow_private: bool) -> None:
    with pytest.raises(GitError, match=r"unknown\.invalid cannot be reached") as caught:
        await sandbox.git_checkout("https://unknown.invalid/x.git", allow_private=allow_private)
    assert caught.value.reason == "network"


@pytest.fixture
def certificate(tmp_path: Path) -> ssl.SSLContext:
    """A self-signed certificate for 127.0.0.1, with its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    key, signed = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [openssl, "req", "-x509", *kind, *name, "-keyout", key, "-out", signed]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(signed, key)
    return context


async def test_self_signed_certificate_is_refused(
    sandbox: Sandbox, repositories: Path, certificate: ssl.SSLContext
) -> None:
    from engine.git.git_server import GitServer

    server = GitServer(repositories)
    async with server.serving(certificate):
        with pytest.raises(GitError, match="cannot be verified: self") as caught:
            await sandbox.git_checkout(f"{server.origin}/plain/project.git", allow_private=True)
    assert caught.value.reason == "network"
    assert not server.seen


async def test_full_disk(sandbox: Sandbox, server: GitServer) -> None:
    fill = "head -c $((62 << 20)) /dev/zero > /dev/shm/fill"
    assert (await sandbox.exec(fill)).success
    with pytest.raises(StorageFull) as caught:
        await sandbox.git_checkout(
            f"{server.origin}/plain/large.git", "/dev/shm/t", allow_private=True
        )
    assert caught.value.path == "/dev/shm/t"
    assert (await sandbox.exec("ls -A /dev/shm")).stdout == "fill\n"


@pytest.mark.parametrize("behaviour", ["stall", "slow"])
async def test_timeout_of_a_slow_host(sandbox: Sandbox, server: GitServer, behaviour: str) -> None:
    url = f"{server.origin}/{behaviour}/large.git"
    with pytest.raises(DeadlineExceeded) as caught:
        await sandbox.git_checkout(url, timeout=1.5, allow_private=True)
    assert (caught.value.operation, caught.value.timeout) == ("git_checkout", 1.5)
    assert not await sandbox.exists("large")
    assert not (await sandbox.exec("pgrep git")).success


@pytest.mark.parametrize("behaviour", ["stall", "slow"])
@pytest.mark.parametrize("existed", [True, False])
async def test_cancelled_checkout_leaves_nothing(
    sandbox: Sandbox, server: GitServer, behaviour: str, existed: bool
) -> None:
    if existed:
        await sandbox.mkdir("t")
    url = f"{server.origin}/{behaviour}/large.git"
    checkout = asyncio.create_task(sandbox.git_checkout(url, "t", allow_private=True))
    await server.reached.wait()
    checkout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checkout
    assert await sandbox.readdir(".") == (["t"] if existed else [])
    assert not existed or await sandbox.readdir("t") == []
    assert not (await sandbox.exec("pgrep git")).success


async def test_incomplete_clone_is_removed_when_git_is_killed(
    sandbox: Sandbox, server: GitServer
) -> None:
    url = f"{server.origin}/slow/large.git"
    checkout = asyncio.create_task(sandbox.git_checkout(url, "t", allow_private=True))
    await server.reached.wait()
    assert await sandbox.exists("t/.git")
    await sandbox.exec("pkill -KILL git")
    with pytest.raises(GitError, match="git could not clone"):
        await checkout
    assert not await sandbox.exists("t")


async def test_failed_checkout_does_not_recreate_a_destroyed_sandbox(
    sandbox: Sandbox, server: GitServer
) -> None:
    url = f"{server.origin}/slow/large.git"
    checkout = asyncio.create_task(sandbox.git_checkout(url, allow_private=True))
    await server.reached.wait()
    await sandbox.destroy()
    with pytest.raises(SandboxGone, match="destroyed"):
        await checkout
    assert await sandbox.info() is None


async def test_sleep_during_a_checkout_leaves_nothing(sandbox: Sandbox, server: GitServer) -> None:
    url = f"{server.origin}/slow/large.git"
    checkout = asyncio.create_task(sandbox.git_checkout(url, allow_private=True))
    await server.reached.wait()
    await sandbox.sleep()
    with pytest.raises(SandboxGone):
        await checkout
    assert not await sandbox.exists("large")


@pytest.mark.parametrize(
    ("url", "options", "option"),
    [
        ("", {}, "url"),
        ("-u./payload", {}, "url"),
        ("--upload-pack=touch /x", {}, "url"),
        ("ext::sh -c touch% /x", {}, "url"),
        ("file:///etc", {}, "url"),
        ("/etc", {}, "url"),
        ("../other", {}, "url"),
        ("ssh://git@example.org/x", {}, "url"),
        ("git://example.org/x", {}, "url"),
        ("git@example.org:x/y.git", {}, "url"),
        ("https::http://example.org/x", {}, "url"),
        ("https://", {}, "url"),
        ("https://exa mple.org/x", {}, "url"),
        ("https://example.org/x\n", {}, "url"),
        ("https://example.org/a/../b", {}, "url"),
        ("https://example.org/a%2fb", {}, "url"),
        ("https://example.org\\@other.org/x", {}, "url"),
        ("https://example.org/x?y=z", {}, "url"),
        ("https://example.org/x#y", {}, "url"),
        ("https://0x7f.1/x", {}, "url"),
        ("https://example.org:99999/x", {}, "url"),
        ("https://u:p@example.org/x", {"password": "q"}, "url"),
        (None, {}, "url"),
        (b"https://example.org/x", {}, "url"),
        ("https://example.org/", {}, "target"),
        ("https://example.org/.git", {}, "target"),
        ("https://example.org/x", {"branch": ""}, "branch"),
        ("https://example.org/x", {"branch": "-f"}, "branch"),
        ("https://example.org/x", {"branch": "a..b"}, "branch"),
        ("https://example.org/x", {"branch": "a b"}, "branch"),
        ("https://example.org/x", {"branch": "a~1"}, "branch"),
        ("https://example.org/x", {"branch": "a^"}, "branch"),
        ("https://example.org/x", {"branch": "a:b"}, "branch"),
        ("https://example.org/x", {"branch": "a\0b"}, "branch"),
        ("https://example.org/x", {"branch": "@"}, "branch"),
        ("https://example.org/x", {"branch": "a@{1}"}, "branch"),
        ("https://example.org/x", {"branch": ".a"}, "branch"),
        ("https://example.org/x", {"branch": "a/.b"}, "branch"),
        ("https://example.org/x", {"branch": "a.lock"}, "branch"),
        ("https://example.org/x", {"branch": "a.lock/b"}, "branch"),
        ("https://example.org/x", {"branch": "a//b"}, "branch"),
        ("https://example.org/x", {"branch": "/a"}, "branch"),
        ("https://example.org/x", {"branch": "a/"}, "branch"),
        ("https://example.org/x", {"branch": "a."}, "branch"),
        ("https://example.org/x", {"branch": "\udcff"}, "branch"),
        ("https://example.org/x", {"branch": "a" * 300}, "branch"),
        ("https://example.org/x", {"depth": 0}, "depth"),
        ("https://example.org/x", {"depth": -1}, "depth"),
        ("https://example.org/x", {"depth": True}, "depth"),
        ("https://example.org/x", {"depth": "1"}, "depth"),
        ("https://example.org/x", {"timeout": 0}, "timeout"),
        ("https://example.org/x", {"username": "a:b", "password": "c"}, "username"),
        ("https://example.org/x", {"password": "a\nb"}, "password"),
        ("https://example.org/x", {"password": 3}, "password"),
        ("https://u:a%0ab@example.org/x", {}, "password"),
    ],
)
async def test_invalid_options_are_refused_before_the_sandbox_wakes(
    sandbox: Sandbox, url: str, options: dict[str, object], option: str
) -> None:
    with pytest.raises(InvalidOption) as caught:
        await sandbox.git_checkout(url, **options)  # type: ignore[arg-type]
    assert caught.value.option == option
    assert await sandbox.info() is None


async def test_error_of_an_invalid_url_has_a_hint_and_no_secret(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidOption, match="https:// and http:// URLs, not ssh://") as caught:
        await sandbox.git_checkout("ssh://user:hunter2@example.org/x")
    assert "hunter2" not in f"{caught.value} {caught.value.fields}"


@pytest.mark.parametrize("target", ["", "a\0b"])
async def test_invalid_targets(sandbox: Sandbox, target: str) -> None:
    with pytest.raises(SmokeboxError) as caught:
        await sandbox.git_checkout("https://example.org/x", target)
    assert caught.value.code == "invalid_path"
