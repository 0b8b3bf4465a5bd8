"""Cloning into a sandbox without a network: what is there afterwards."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.git.git_server import GitServer, git
from smokebox.errors import Conflict, PathExists, Unsupported

if TYPE_CHECKING:
    from smokebox.engine import Host, Sandbox


def commit_of(repositories: Path, name: str) -> str:
    return git("rev-parse", f"{name}^{{commit}}", cwd=repositories / "project.git")


def peak_memory(*, reset: bool = False) -> int:
    """Return the peak memory of this process since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+([0-9]+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


async def test_clone_is_complete_with_the_real_origin(
    sandbox: Sandbox, server: GitServer, repositories: Path
) -> None:
    url = f"{server.origin}/plain/project.git"
    checkout = await sandbox.git_checkout(url, allow_private=True)
    assert (checkout.url, checkout.target, checkout.branch) == (url, "/workspace/project", "main")
    assert checkout.commit == commit_of(repositories, "main")
    assert await sandbox.read_file("/workspace/project/file.txt") == "2\n"
    result = await sandbox.exec(
        "git remote get-url origin; git rev-list --count HEAD; git branch -r --list 'origin/f*';"
        " git config --local --get-regexp '^(url|http|credential|core.hookspath)';"
        " git status --porcelain; git fsck --no-progress",
        cwd=checkout.target,
    )
    assert result.stdout == f"{url}\n2\n  origin/feature/größe\n"


async def test_url_of_the_proxy_is_not_stored(sandbox: Sandbox, server: GitServer) -> None:
    checkout = await sandbox.git_checkout(f"{server.origin}/plain/project.git", allow_private=True)
    found = await sandbox.exec(
        ["grep", "-raohE", "127[.]0[.]0[.]1:[0-9]+", ".git"], cwd=checkout.target
    )
    assert set(found.stdout.split()) == {f"127.0.0.1:{server.port}"}


@pytest.mark.parametrize(
    ("branch", "head", "revision"),
    [("feature/größe", "feature/größe", "v1"), ("v1", None, "v1"), ("main", "main", "v2")],
)
async def test_branch_or_tag_is_checked_out(
    sandbox: Sandbox,
    server: GitServer,
    repositories: Path,
    branch: str,
    head: str | None,
    revision: str,
) -> None:
    checkout = await sandbox.git_checkout(
        f"{server.origin}/plain/project.git", "target", branch=branch, allow_private=True
    )
    assert (checkout.target, checkout.branch) == ("/workspace/target", head)
    assert checkout.commit == commit_of(repositories, revision)


async def test_depth_excludes_older_commits(sandbox: Sandbox, server: GitServer) -> None:
    url = f"{server.origin}/plain/project.git"
    checkout = await sandbox.git_checkout(url, depth=1, allow_private=True)
    counted = await sandbox.exec("git rev-list --count HEAD", cwd=checkout.target)
    assert counted.stdout == "1\n"


async def test_empty_repository_has_a_branch_and_no_commit(
    sandbox: Sandbox, server: GitServer
) -> None:
    checkout = await sandbox.git_checkout(f"{server.origin}/plain/empty.git/", allow_private=True)
    assert (checkout.target, checkout.branch, checkout.commit) == (
        "/workspace/empty",
        "trunk",
        None,
    )


async def test_existing_empty_directory_is_a_valid_target(
    sandbox: Sandbox, server: GitServer
) -> None:
    checkout = await sandbox.git_checkout(
        f"{server.origin}/plain/project.git", "/workspace", allow_private=True
    )
    assert checkout.target == "/workspace"
    assert await sandbox.readdir("/workspace") == [".git", "file.txt"]


@pytest.mark.parametrize(
    "before",
    [
        "mkdir -p t && touch t/.hidden",
        "touch t",
        "ln -s /nowhere t",
        "mkdir d; touch d/f; ln -s d t",
    ],
)
async def test_existing_target_is_refused_before_any_request(
    sandbox: Sandbox, server: GitServer, before: str
) -> None:
    assert (await sandbox.exec(before)).success
    listing = (await sandbox.exec("find . | sort")).stdout
    with pytest.raises(PathExists) as caught:
        await sandbox.git_checkout(f"{server.origin}/plain/project.git", "t", allow_private=True)
    assert caught.value.path == "/workspace/t"
    assert not server.seen
    assert (await sandbox.exec("find . | sort")).stdout == listing


async def test_concurrent_checkouts_to_one_target_are_refused(
    sandbox: Sandbox, server: GitServer
) -> None:
    slow = f"{server.origin}/slow/large.git"
    first = asyncio.create_task(sandbox.git_checkout(slow, "t", allow_private=True))
    await server.reached.wait()
    with pytest.raises(Conflict):
        await sandbox.git_checkout(f"{server.origin}/plain/project.git", "t", allow_private=True)
    assert not first.done()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await sandbox.git_checkout(f"{server.origin}/plain/project.git", "t", allow_private=True)


async def test_git_configuration_of_the_sandbox_does_not_redirect_the_clone(
    host: Host, server: GitServer
) -> None:
    url = f"{server.origin}/plain/project.git"
    env = {"http_proxy": "http://127.0.0.1:9", "GIT_DIR": "/nowhere", "GIT_TRACE_CURL": "/t"}
    sandbox = host.sandbox("odd", env=env)
    await sandbox.write_file(
        "/root/.gitconfig", f'[url "http://127.0.0.1:9/"]\ninsteadOf = {url}\n'
    )
    hook = "mkdir -p /t/hooks; printf '#!/bin/sh\\ntouch /ran' > /t/hooks/post-checkout"
    configure = "chmod +x /t/hooks/*; env -u GIT_DIR git config --global init.templateDir /t"
    assert (await sandbox.exec(f"{hook}; {configure}")).success
    await sandbox.git_checkout(url, allow_private=True)
    assert not await sandbox.exists("/ran")


async def test_compressed_request_is_forwarded(sandbox: Sandbox, tmp_path: Path) -> None:
    work = tmp_path / "many.git"
    work.mkdir()
    git("init", "--quiet", "--bare", cwd=work)
    tree = git("hash-object", "-t", "tree", "-w", "/dev/null", cwd=work)
    for number in range(60):
        commit = git("commit-tree", "-m", str(number), tree, cwd=work)
        git("update-ref", f"refs/heads/b{number}", commit, cwd=work)
    server = GitServer(tmp_path)
    async with server.serving():
        await sandbox.git_checkout(
            f"{server.origin}/plain/many.git", branch="b7", allow_private=True
        )
    assert any(headers.get("Content-Encoding") == "gzip" for _, headers in server.seen)


async def test_redirect_is_followed_and_the_original_url_kept(
    sandbox: Sandbox, server: GitServer
) -> None:
    url = f"{server.origin}/moved/project.git"
    checkout = await sandbox.git_checkout(url, allow_private=True)
    assert checkout.url == url
    assert [request for request, _ in server.seen] == [
        "GET /moved/project.git/info/refs?service=git-upload-pack",
        "GET /plain/project.git/info/refs?service=git-upload-pack",
        "POST /plain/project.git/git-upload-pack",
        "POST /plain/project.git/git-upload-pack",
    ]


async def test_image_without_git(host: Host, server: GitServer) -> None:
    sandbox = host.sandbox("bare", env={"PATH": "/nowhere"})
    with pytest.raises(Unsupported, match="image that has git"):
        await sandbox.git_checkout(f"{server.origin}/plain/project.git", allow_private=True)


@pytest.mark.timeout(60)
async def test_large_repository_in_bounded_memory(sandbox: Sandbox, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    git("init", "--quiet", "--initial-branch=main", cwd=work)
    with open("/dev/urandom", "rb") as noise:
        for number in range(4):
            (work / f"{number}.bin").write_bytes(noise.read(8 << 20))
    git("-c", "core.compression=0", "add", ".", cwd=work)
    git("commit", "--quiet", "-m", "Large", cwd=work)
    git("clone", "--quiet", "--bare", "--local", str(work), "big.git", cwd=tmp_path)
    # The server should not search for deltas in random data.
    git("config", "pack.window", "0", cwd=tmp_path / "big.git")
    server = GitServer(tmp_path)
    async with server.serving():
        before = peak_memory(reset=True)
        checkout = await sandbox.git_checkout(f"{server.origin}/plain/big.git", allow_private=True)
        grown = peak_memory() - before
    assert (await sandbox.stat(f"{checkout.target}/3.bin")).size == 8 << 20
    assert grown < 16 << 20


@pytest.mark.gvisor
@pytest.mark.timeout(60)
async def test_checkout_in_gvisor(host: Host, server: GitServer, repositories: Path) -> None:
    sandbox = host.sandbox("walled", tier="gvisor")
    checkout = await sandbox.git_checkout(f"{server.origin}/plain/project.git", allow_private=True)
    assert checkout.commit == commit_of(repositories, "main")
    assert await sandbox.read_file(f"{checkout.target}/file.txt") == "2\n"
