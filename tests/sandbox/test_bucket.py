"""`bucket()`: the conformance suite over three stores, and behaviour beyond it."""

from __future__ import annotations

import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import obstore
import pytest
import pytest_asyncio
from obstore.store import LocalStore, MemoryStore, S3Store

from smokebox import bucket, get_virtual_sandbox, virtual
from smokebox.errors import (
    AccessDenied,
    BucketNotFound,
    InvalidOption,
    MissingDependency,
    ServiceUnavailable,
    SmokeboxError,
)
from smokebox.sandbox.bucket import BucketSandbox
from smokebox.sandbox.conformance import SandboxSuite
from smokebox.sandbox.filesystems.bucket import BucketFilesystem
from smokebox.testing import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator
    from pathlib import Path


SECRET = "kept-outside-0123456789"


class TestMemoryConformance(SandboxSuite):
    @pytest_asyncio.fixture
    async def sandbox(self) -> AsyncIterator[BucketSandbox]:
        async with bucket("memory:///") as sandbox:
            yield sandbox


class TestFolderConformance(SandboxSuite):
    @pytest_asyncio.fixture
    async def sandbox(self, tmp_path: Path) -> AsyncIterator[BucketSandbox]:
        async with bucket(f"file://{tmp_path}") as sandbox:
            yield sandbox


class TestS3Conformance(SandboxSuite):
    @pytest_asyncio.fixture
    async def sandbox(
        self, seaweed: SeaweedServer, bucket_name: str
    ) -> AsyncIterator[BucketSandbox]:
        async with open_bucket(seaweed, bucket_name) as sandbox:
            yield sandbox


def open_bucket(seaweed: SeaweedServer, name: str, *, read_only: bool = False) -> BucketSandbox:
    return bucket(
        name,
        endpoint=seaweed.endpoint,
        access_key=seaweed.access_key,
        secret_key=seaweed.secret_key,
        read_only=read_only,
    )


def other_client(seaweed: SeaweedServer, name: str) -> S3Store:
    return S3Store(
        name,
        endpoint=seaweed.endpoint,
        access_key_id=seaweed.access_key,
        secret_access_key=seaweed.secret_key,
        client_options={"allow_http": True},
    )


@pytest.fixture
def store(seaweed: SeaweedServer, bucket_name: str) -> S3Store:
    return other_client(seaweed, bucket_name)


@pytest_asyncio.fixture
async def sandbox(seaweed: SeaweedServer, bucket_name: str) -> AsyncIterator[BucketSandbox]:
    async with open_bucket(seaweed, bucket_name) as sandbox:
        yield sandbox


async def output(sandbox: BucketSandbox, command: str) -> str:
    result = await sandbox.exec(command)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def fill(store: S3Store, items: Iterable[tuple[str, bytes]]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: obstore.put(store, *item), items))


@pytest.fixture(scope="module")
def ten_thousand(seaweed: SeaweedServer) -> Iterator[str]:
    """Create a bucket with 10,000 objects in 100 folders, one of which contains "needle"."""
    name = seaweed.create_bucket("ten-thousand")
    items = [(f"docs/{n % 100:02}/{n:05}.md", b"text %d\n" % n) for n in range(10_000)]
    items[7777] = (items[7777][0], b"a needle\n")
    fill(other_client(seaweed, name), items)
    yield name
    seaweed.delete_bucket(name)


@pytest.mark.skipif("SMOKEBOX_SOAK" not in os.environ, reason="takes long: see `make soak`")
@pytest.mark.timeout(120)
async def test_ten_thousand_objects(seaweed: SeaweedServer, ten_thousand: str) -> None:
    async with open_bucket(seaweed, ten_thousand, read_only=True) as sandbox:
        assert await output(sandbox, "find . -type f | wc -l") == "10000\n"
        assert await output(sandbox, "grep -rl needle .") == "./docs/77/07777.md\n"
        assert await output(sandbox, "ls docs | wc -l") == "100\n"
        assert await output(sandbox, "shopt -s globstar; ls **/077*.md | wc -l") == "100\n"
        assert len(await sandbox.glob("**/*.md")) == 10_000


async def test_changes_by_another_client_show_in_the_next_command(
    sandbox: BucketSandbox, store: S3Store
) -> None:
    assert await output(sandbox, "ls") == ""
    obstore.put(store, "f", b"one\n")
    assert await output(sandbox, "ls; cat f") == "f\none\n"
    obstore.put(store, "f", b"two\n")
    assert await output(sandbox, "ls; cat f") == "f\ntwo\n"
    obstore.put(store, "f", b"six\n")
    assert await sandbox.read_file("f") == "six\n"
    obstore.delete(store, "f")
    assert await output(sandbox, "ls") == ""
    assert not await sandbox.exists("f")


async def test_running_command_sees_an_object_of_another_client(
    sandbox: BucketSandbox, store: S3Store
) -> None:
    obstore.put(store, "d/other", b"")
    script = "[ -d d ]; ls d; echo ready; until [ -f d/done ]; do sleep 0.1; done; cat d/done"
    stream = sandbox.exec_stream(script)
    output = ""
    async for chunk in stream:
        output += chunk.data
        if chunk.data.endswith("ready\n"):
            obstore.put(store, "d/done", b"it is\n")
    assert (stream.exit_code, output) == (0, "other\nready\nit is\n")


async def test_common_commands_work(sandbox: BucketSandbox, store: S3Store) -> None:
    await sandbox.write_file("notes/a b.txt", "one\ntwo\nthree\n")
    assert await output(sandbox, "head -1 notes/*; wc -l < 'notes/a b.txt'") == "one\n3\n"
    await output(
        sandbox, "sort notes/* > sorted; echo more >> sorted; mkdir -p x/y; mv sorted x/y/"
    )
    assert bytes(obstore.get(store, "x/y/sorted").bytes()) == b"one\nthree\ntwo\nmore\n"
    await output(sandbox, "cp -r notes copy; sed -i s/one/ONE/ copy/*; rm -r notes x")
    assert (
        await output(sandbox, "find . -type f; cat copy/*") == "./copy/a b.txt\nONE\ntwo\nthree\n"
    )


async def test_unicode_and_odd_keys(sandbox: BucketSandbox, store: S3Store) -> None:
    keys = ["ünï/日本 😀.txt", "q'uo\"te", "a#b?c%20+&=", "-rf", "w*[1]"]
    fill(store, [(key, b"needle") for key in keys])
    assert sorted((await output(sandbox, "grep -rl needle .")).splitlines()) == sorted(
        f"./{key}" for key in keys
    )
    assert await output(sandbox, "cat ünï/*") == "needle"


async def test_50_mb_object(sandbox: BucketSandbox, store: S3Store) -> None:
    obstore.put(store, "large", b"x" * 50_000_000)
    assert (await sandbox.stat("large")).size == 50_000_000
    assert len(await sandbox.read_bytes("large")) == 50_000_000


async def test_read_only_bucket_refuses_writes(
    seaweed: SeaweedServer, bucket_name: str, store: S3Store
) -> None:
    obstore.put(store, "f", b"kept\n")
    async with open_bucket(seaweed, bucket_name, read_only=True) as sandbox:
        with pytest.raises(AccessDenied, match="read_only"):
            await sandbox.write_file("g", "x")
        with pytest.raises(AccessDenied):
            await sandbox.rm("f")
        assert not (await sandbox.exec("rm f")).success
        assert not (await sandbox.exec("echo x > f")).success
        assert (await sandbox.capabilities()).read_only
        assert await output(sandbox, "cat f; ls; echo x > /tmp/x; cat /tmp/x") == "kept\nf\nx\n"


async def test_root_of_the_bucket_is_never_removed(sandbox: BucketSandbox, store: S3Store) -> None:
    obstore.put(store, "kept", b"x")
    with pytest.raises(SmokeboxError):
        await sandbox.rm("/workspace", recursive=True, force=True)
    await sandbox.exec("cd /; rm -rf /workspace; rm -rf /")
    assert await sandbox.readdir("/workspace") == ["kept"]


async def test_fork_shares_the_bucket_and_not_the_shell(sandbox: BucketSandbox) -> None:
    await output(sandbox, "x=1; echo shared > f")
    async with (await sandbox.fork())[0] as forked:
        assert isinstance(forked, BucketSandbox)
        assert await output(forked, "x=2; cat f; echo $x") == "shared\n2\n"
        assert (await forked.capabilities()).sandbox == "bucket"
    assert await output(sandbox, "echo $x; cat f") == "1\nshared\n"


async def test_credentials_are_not_visible_inside(
    seaweed: SeaweedServer, bucket_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed.secret_key)
    async with bucket(bucket_name, endpoint=seaweed.endpoint) as sandbox:
        await sandbox.write_file("f", "x")
        result = await sandbox.exec(
            "env; set; export -p; cat /proc/self/environ /etc/* ~/.aws/*; cat nope; grep -r . / "
        )
        assert seaweed.secret_key not in result.stdout + result.stderr
        assert seaweed.secret_key not in repr(sandbox) + repr(await sandbox.capabilities())


async def test_error_for_wrong_credentials_says_where_they_come_from(
    seaweed: SeaweedServer, bucket_name: str
) -> None:
    async with bucket(
        bucket_name, endpoint=seaweed.endpoint, access_key=seaweed.access_key, secret_key=SECRET
    ) as sandbox:
        for call in (lambda: sandbox.exec("ls"), lambda: sandbox.readdir(".")):
            with pytest.raises(AccessDenied, match=r"access_key=.*AWS_ACCESS_KEY_ID") as caught:
                await call()
            assert SECRET not in f"{caught.value} {caught.value.fields}"


async def test_missing_bucket_is_reported_by_the_first_command(seaweed: SeaweedServer) -> None:
    async with open_bucket(seaweed, "no-such-bucket") as sandbox:
        with pytest.raises(BucketNotFound, match="no-such-bucket"):
            await sandbox.exec("ls")
    with pytest.raises(BucketNotFound):
        await get_virtual_sandbox(
            "no-such-bucket",
            endpoint=seaweed.endpoint,
            access_key=seaweed.access_key,
            secret_key=seaweed.secret_key,
        )


async def test_unreachable_server_is_reported(unused_tcp_port: int) -> None:
    endpoint = f"http://127.0.0.1:{unused_tcp_port}"
    async with bucket("name", endpoint=endpoint, access_key="a", secret_key="b") as sandbox:
        with pytest.raises(ServiceUnavailable) as caught:
            await sandbox.exec("ls")
        assert (caught.value.retryable, endpoint in str(caught.value)) == (True, True)


@pytest.mark.timeout(90)
async def test_lost_server_is_reported_by_the_next_command() -> None:
    with SeaweedServer() as server:
        async with open_bucket(server, server.create_bucket("going")) as sandbox:
            await sandbox.write_file("f", "x")
            server.stop()
            with pytest.raises(ServiceUnavailable):
                await sandbox.read_file("f")
            with pytest.raises(ServiceUnavailable):
                await sandbox.exec("ls")


@pytest.mark.timeout(90)
async def test_server_that_never_responds_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        async with bucket("name", endpoint=endpoint, access_key="a", secret_key="b") as sandbox:
            with pytest.raises(ServiceUnavailable):
                await sandbox.exec("ls")
    assert time.monotonic() - started < 60


async def test_target_may_be_a_url_or_a_store(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("hello")
    for target, prefix in (
        (f"file://{tmp_path}", "docs"),
        (f"file://{tmp_path}/docs", ""),
        (LocalStore(tmp_path), "docs"),
    ):
        async with bucket(target, prefix=prefix, read_only=True) as sandbox:
            assert await sandbox.read_file("a.txt") == "hello"


async def test_two_sandboxes_share_a_memory_store() -> None:
    shared = MemoryStore()
    async with bucket(shared, cwd="/kb") as one, await get_virtual_sandbox(shared) as two:
        await one.write_file("/kb/f", "x")
        assert (await two.readdir("/workspace"), one.cwd) == (["f"], "/kb")


async def test_sandbox_without_a_bucket_is_in_memory() -> None:
    async with await get_virtual_sandbox() as sandbox:
        assert (await sandbox.capabilities()).persistence == "memory"


async def test_capabilities_describe_the_bucket() -> None:
    async with bucket("memory:///", shell="fresh") as sandbox:
        found = await sandbox.capabilities()
    assert (found.sandbox, found.persistence, found.shell_state) == ("bucket", "bucket", "fresh")
    assert not (found.symlinks or found.file_modes)
    assert found.refused_in_names == "\n"


@pytest.mark.parametrize(
    "target", ["", "Bad_Name", "a/b", "x", "a?b=c", "ftp://x", "http://host/b", "s3://", "s3:///x"]
)
def test_invalid_target_is_refused(target: str) -> None:
    with pytest.raises(InvalidOption):
        bucket(target)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BucketNotFound):
        bucket(f"file://{tmp_path}/nope")


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"endpoint": "127.0.0.1:9000"}, "endpoint"),
        ({"endpoint": "ftp://host"}, "endpoint"),
        ({"access_key": "a"}, "secret_key"),
        ({"secret_key": "a"}, "access_key"),
        ({"prefix": "a/../b"}, "prefix"),
        ({"cache_bytes": -1}, "cache_bytes"),
        ({"prefetch": 1.5}, "prefetch"),
        ({"cwd": "/"}, "mounts"),
        ({"shell": "zsh"}, "shell"),
    ],
)
def test_invalid_option_is_named(options: dict[str, object], option: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        bucket("name", **options)  # type: ignore[arg-type]
    assert caught.value.fields["option"] == option


def test_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(InvalidOption, match="read_only"):
        bucket("name", readonly=True)  # type: ignore[call-arg]


def test_credentials_are_refused_for_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="access_key"):
        bucket(f"file://{tmp_path}", access_key="a", secret_key="b")
    with pytest.raises(InvalidOption, match="endpoint"):
        bucket(MemoryStore(), endpoint="http://127.0.0.1:9000")


def test_missing_obstore_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingDependency, match=r"smokebox\[bucket\]"):
        bucket("memory:///")


async def test_mounted_bucket_shows_changes_in_the_next_command() -> None:
    store = MemoryStore()
    sandbox = virtual(mounts={"/data": BucketFilesystem(store)})
    obstore.put(store, "a.txt", b"first")
    assert (await sandbox.exec("cat /data/*")).stdout == "first"
    obstore.put(store, "b.txt", b"second")
    assert (await sandbox.exec("cat /data/*")).stdout == "firstsecond"
    assert await sandbox.readdir("/data") == ["a.txt", "b.txt"]
    await sandbox.aclose()
