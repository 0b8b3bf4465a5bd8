"""Credentials of a clone, which reach only the host that they are for."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import traceback
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from engine.git.git_server import BASIC, TOKEN, USER
from smokebox.errors import GitError

if TYPE_CHECKING:
    from engine.git.git_server import GitServer
    from smokebox.engine import Host, Sandbox

SECRETS = (TOKEN, BASIC, quote(TOKEN), TOKEN.partition("å")[0])


def with_userinfo(url: str) -> str:
    return url.replace("http://", f"http://{USER}:{quote(TOKEN)}@")


def assert_no_secret(*texts: str) -> None:
    for text in texts:
        assert not [secret for secret in SECRETS if secret in text]


def assert_no_secret_below(folder: Path) -> None:
    """Check the names and contents of all files below a directory of the host."""
    patterns = [arg for secret in SECRETS for arg in ("-e", secret)]
    found = subprocess.run(
        ["grep", "-rlaF", *patterns, str(folder)], capture_output=True, text=True
    )
    assert (found.returncode, found.stdout) == (1, ""), found
    assert_no_secret(*(str(path) for path in folder.rglob("*")))


def processes_below(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    found = {pid}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found |= processes_below(int(child))
    return found


@pytest.mark.parametrize("option", ["password", "userinfo"])
async def test_private_repository_is_cloned_without_a_secret_in_the_sandbox(
    host: Host, sandbox: Sandbox, server: GitServer, caplog: pytest.LogCaptureFixture, option: str
) -> None:
    caplog.set_level(logging.DEBUG)
    server.requires_token = True
    url = f"{server.origin}/plain/project.git"
    if option == "password":
        result = await sandbox.git_checkout(url, username=USER, password=TOKEN, allow_private=True)
    else:
        result = await sandbox.git_checkout(with_userinfo(url), allow_private=True)
    assert result.url == url
    assert result.commit
    assert all(headers["Authorization"] == f"Basic {BASIC}" for _, headers in server.seen)
    remote = await sandbox.exec("git remote get-url origin", cwd=result.target)
    assert remote.stdout == f"{url}\n"
    assert_no_secret_below(Path(host.home))
    assert_no_secret(repr(result), caplog.text)


async def test_no_process_in_the_sandbox_has_the_secret(
    host: Host, sandbox: Sandbox, server: GitServer
) -> None:
    server.requires_token = True
    url = with_userinfo(f"{server.origin}/slow/large.git")
    checkout = asyncio.create_task(sandbox.git_checkout(url, allow_private=True))
    await server.reached.wait()
    inside = processes_below(os.getpid()) - {os.getpid()}
    checked = 0
    for pid in inside:
        for name in ("environ", "cmdline"):
            text = Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
            assert_no_secret(text)
            checked += "git" in text
    assert checked > 1
    assert_no_secret_below(Path(host.home))
    checkout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checkout
    assert_no_secret_below(Path(host.home))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("status/401/project.git", "authentication"),
        ("status/403/project.git", "authentication"),
        ("status/404/project.git", "repository_not_found"),
        ("status/500/project.git", "network"),
        ("cut/large.git", "network"),
        ("page/x.git", "failed"),
        ("plain/project.git", "branch_not_found"),
    ],
)
async def test_errors_do_not_contain_the_secret(
    host: Host,
    sandbox: Sandbox,
    server: GitServer,
    caplog: pytest.LogCaptureFixture,
    path: str,
    reason: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    url = with_userinfo(f"{server.origin}/{path}")
    branch = "gone" if reason == "branch_not_found" else None
    with pytest.raises(GitError) as caught:
        await sandbox.git_checkout(url, branch=branch, allow_private=True)
    assert caught.value.reason == reason
    text = "".join(traceback.format_exception(caught.value))
    assert_no_secret(text, repr(caught.value.fields), caplog.text)
    assert_no_secret_below(Path(host.home))


async def test_missing_and_wrong_credentials_have_different_errors(
    sandbox: Sandbox, server: GitServer
) -> None:
    server.requires_token = True
    url = f"{server.origin}/plain/project.git"
    with pytest.raises(GitError, match="asks for credentials") as none:
        await sandbox.git_checkout(url, allow_private=True)
    with pytest.raises(GitError, match="refuses these credentials") as wrong:
        await sandbox.git_checkout(url, password="wrong", allow_private=True)
    assert none.value.reason == wrong.value.reason == "authentication"
    assert "wrong" not in str(wrong.value)


async def test_redirect_to_another_host_does_not_get_the_secret(
    sandbox: Sandbox, server: GitServer
) -> None:
    url = f"{server.origin}/far/project.git"
    await sandbox.git_checkout(url, password=TOKEN, allow_private=True)
    by_host = {headers["Host"]: "Authorization" in headers for _, headers in server.seen}
    assert by_host == {f"127.0.0.1:{server.port}": True, f"localhost:{server.port}": False}


async def test_proxy_allows_only_reads_of_one_repository(
    sandbox: Sandbox, server: GitServer
) -> None:
    server.requires_token = True
    url = with_userinfo(f"{server.origin}/slow/large.git")
    checkout = asyncio.create_task(sandbox.git_checkout(url, allow_private=True))
    await server.reached.wait()
    arguments = (await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'")).stdout
    found = re.search(r"url\.(http://127\.0\.0\.1:[0-9]+/)([\w-]+)\.insteadOf", arguments)
    assert found is not None
    proxy, token = found.groups()
    before = len(server.seen)
    for path in (
        "",
        "x/info/refs?service=git-upload-pack",
        f"{token}/info/refs?service=git-receive-pack",
        f"{token}/info/refs",
        f"{token}/HEAD",
        f"{token}/../plain/project.git/info/refs?service=git-upload-pack",
        f"{token}/git-upload-pack",
        f"{token}x/info/refs?service=git-upload-pack",
    ):
        get = ["curl", "--path-as-is", "-s", "-o", "/dev/null", "-w", "%{http_code}"]
        assert (await sandbox.exec([*get, proxy + path])).stdout == "404", path
    push = ["curl", "-s", "-d", "x", "-o", "/dev/null", "-w", "%{http_code}"]
    assert (await sandbox.exec([*push, f"{proxy}{token}/git-receive-pack"])).stdout == "404"
    assert len(server.seen) == before
    refs = f"{proxy}{token}/info/refs?service=git-upload-pack"
    assert (await sandbox.exec(["curl", "-sf", "-o", "/dev/null", refs])).success
    checkout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checkout
    assert (await sandbox.exec(["curl", "-s", refs])).exit_code == 7


async def test_connections_to_the_proxy_are_limited(sandbox: Sandbox, server: GitServer) -> None:
    url = f"{server.origin}/stall/project.git"
    checkout = asyncio.create_task(sandbox.git_checkout(url, allow_private=True))
    await server.reached.wait()
    arguments = (await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'")).stdout
    found = re.search(r"url\.http://127\.0\.0\.1:([0-9]+)/", arguments)
    assert found is not None
    before = len(os.listdir("/proc/self/fd"))
    flood = (
        "import socket, sys; held = [socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
        " for _ in range(200)]; print('on', flush=True); sys.stdin.read()"
    )
    process = await sandbox.start_process(["python3", "-c", flood, found[1]], stdin=True)
    await process.wait_for_log("on", timeout=15)
    assert len(os.listdir("/proc/self/fd")) - before < 40
    await process.kill()
    checkout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checkout
