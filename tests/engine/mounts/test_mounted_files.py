"""File operations of programs on a mounted bucket, and the resulting objects."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox.errors import AccessDenied, PathNotFound
from unprivileged import rerun_as_nobody

if TYPE_CHECKING:
    from engine.mounts.conftest import Bucket
    from engine.mounts.store import Store
    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox


async def output(sandbox: Sandbox, command: str, **options: str) -> str:
    """Return the output of a command that must succeed."""
    result = await sandbox.exec(command, timeout=15, user=options.get("user"))
    assert result.exit_code == 0, result
    return result.stdout


async def python(sandbox: Sandbox, code: str) -> str:
    """Return the output of a Python program in the sandbox."""
    result = await sandbox.exec(["python3", "-c", code], cwd="/data", timeout=15)
    assert result.exit_code == 0, result
    return result.stdout


async def test_file_is_uploaded_when_it_is_closed(sandbox: Sandbox, store: Store) -> None:
    await output(sandbox, "mkdir -p /data/a/b && printf 'hello' > /data/a/b/c.txt")
    assert store["a/b/c.txt"] == b"hello"
    assert await output(sandbox, "cat /data/a/b/c.txt; ls /data; ls /data/a/b") == "helloa\nc.txt\n"


async def test_objects_of_other_clients_can_be_read(sandbox: Sandbox, store: Store) -> None:
    store["from/outside.bin"] = bytes(range(256)) * 5000
    found = await output(sandbox, "cd /data/from && stat -c %s outside.bin && md5sum outside.bin")
    digest = hashlib.md5(bytes(range(256)) * 5000).hexdigest()
    assert found == f"1280000\n{digest}  outside.bin\n"


async def test_replaced_object_is_read_in_one_version(sandbox: Sandbox, store: Store) -> None:
    store["x"] = b"short"
    assert await output(sandbox, "cat /data/x") == "short"
    store["x"] = b"longer than it was before"
    async with asyncio.timeout(15):
        while (found := await output(sandbox, "cat /data/x")) == "short":
            await asyncio.sleep(0.1)
    assert found == "longer than it was before"


async def test_objects_removed_by_other_clients_disappear(sandbox: Sandbox, store: Store) -> None:
    store["x"] = b"here"
    assert await output(sandbox, "ls /data") == "x\n"
    del store["x"]
    async with asyncio.timeout(15):
        while await output(sandbox, "ls /data"):
            await asyncio.sleep(0.1)


async def test_large_file_is_read_and_written(sandbox: Sandbox, store: Store) -> None:
    data = os.urandom(1 << 20) * 90
    store["large"] = data
    digest = hashlib.sha256(data).hexdigest()
    assert (await output(sandbox, "sha256sum < /data/large")).split()[0] == digest
    await output(sandbox, "cp /data/large /data/copy")
    assert hashlib.sha256(store["copy"]).hexdigest() == digest


async def test_random_reads_of_a_large_file(sandbox: Sandbox, store: Store) -> None:
    data = os.urandom(1 << 20) * 20
    store["large"] = data
    code = """
import hashlib, random
random.seed(7)
with open("large", "rb", buffering=0) as file:
    for _ in range(40):
        place = random.randrange(20 << 20)
        file.seek(place)
        print(place, hashlib.sha256(file.read(5000)).hexdigest())
"""
    for line in (await python(sandbox, code)).splitlines():
        place, digest = line.split()
        part = data[int(place) : int(place) + 5000]
        # A raw read may be short, at the end of a cached page.
        assert digest in {hashlib.sha256(part[:n]).hexdigest() for n in range(len(part), 0, -1)}


async def test_files_are_modified_in_place(sandbox: Sandbox, store: Store) -> None:
    store["f"] = b"0123456789"
    code = """
import os
with open("f", "r+b") as file:
    file.seek(3); file.write(b"abc"); file.truncate(8)
with open("f", "ab") as file:
    file.write(b"end")
os.truncate("f", 12)
print(open("f", "rb").read())
"""
    assert await python(sandbox, code) == repr(b"012abc67end\0") + "\n"
    assert store["f"] == b"012abc67end\0"


async def test_concurrent_appends_lose_nothing(sandbox: Sandbox, store: Store) -> None:
    code = """
import os
first, second = (os.open("log", os.O_CREAT | os.O_WRONLY | os.O_APPEND) for _ in range(2))
for n in range(50):
    os.write(first, b"a\\n"); os.write(second, b"b\\n")
os.close(first); os.close(second)
"""
    await python(sandbox, code)
    assert store["log"] == b"a\nb\n" * 50


async def test_fsync_uploads_an_open_file(sandbox: Sandbox, store: Store) -> None:
    code = """
import os, sys
file = open("f", "wb")
file.write(b"synced"); file.flush(); os.fsync(file.fileno())
os.kill(os.getpid(), 9)
"""
    await sandbox.exec(["python3", "-c", code], cwd="/data")
    assert store["f"] == b"synced"


async def test_memory_mapped_writes_are_uploaded(sandbox: Sandbox, store: Store) -> None:
    code = """
import mmap
open("f", "wb").write(bytes(8192))
with open("f", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
    mapped[100:105] = b"hello"
"""
    await python(sandbox, code)
    assert store["f"][100:105] == b"hello"


async def test_rename_replaces_a_file(sandbox: Sandbox, store: Store) -> None:
    store["old"] = b"old"
    await output(sandbox, "cd /data && echo new > tmp && mv tmp old && cat old")
    assert (store["old"], store.keys()) == (b"new\n", ["old"])


async def test_rename_of_an_open_file(sandbox: Sandbox, store: Store) -> None:
    code = """
import os
file = open("tmp", "wb"); file.write(b"first "); file.flush()
os.rename("tmp", "final"); file.write(b"second"); file.close()
"""
    await python(sandbox, code)
    assert (store["final"], store.keys()) == (b"first second", ["final"])


async def test_rename_of_a_directory(sandbox: Sandbox, store: Store) -> None:
    await output(sandbox, "cd /data && mkdir -p a/b && echo 1 > a/b/x && echo 2 > a/y && mv a c")
    assert (store["c/b/x"], store["c/y"]) == (b"1\n", b"2\n")
    assert await output(sandbox, "cd /data && find . -type f | sort; cat c/b/x") == (
        "./c/b/x\n./c/y\n1\n"
    )


async def test_removed_trees_are_deleted(sandbox: Sandbox, store: Store) -> None:
    await output(sandbox, "cd /data && mkdir -p a/b/c && echo 1 > a/b/c/x")
    result = await sandbox.exec("rmdir /data/a")
    assert (result.exit_code, "not empty" in result.stderr) == (1, True)
    assert "a/b/c/x" in store
    await output(sandbox, "rm -r /data/a && test ! -e /data/a")
    assert store.keys() == []


async def test_writes_to_a_removed_file_are_not_uploaded(sandbox: Sandbox, store: Store) -> None:
    code = """
import os
file = open("f", "w+b"); os.unlink("f")
file.write(b"scratch"); file.seek(0); print(file.read()); file.close()
"""
    assert await python(sandbox, code) == "b'scratch'\n"
    assert store.keys() == []


async def test_open_file_is_listed(sandbox: Sandbox) -> None:
    code = """
import os
file = open("f", "wb"); file.write(b"12345"); file.flush()
print(os.listdir("."), os.stat("f").st_size)
"""
    assert await python(sandbox, code) == "['f'] 5\n"


async def test_links_and_devices_are_refused(sandbox: Sandbox) -> None:
    for command in ("ln -s x l", "ln f g", "mkfifo p", "mknod n c 1 3"):
        result = await sandbox.exec(f"cd /data && touch f && {command}")
        assert result.exit_code != 0, command
        assert "ermitted" in result.stderr


async def test_modes_and_times_last_during_the_mount(sandbox: Sandbox) -> None:
    found = await output(
        sandbox,
        "cd /data && printf '#!/bin/sh\\necho ran' > s && chmod +x s && ./s"
        " && touch -d @1000000000 s && stat -c %Y s && cp -p s t && stat -c %Y t",
    )
    assert found == "ran\n1000000000\n1000000000\n"


async def test_owner_cannot_be_changed(sandbox: Sandbox) -> None:
    await output(sandbox, "cd /data && touch f && chown root:root f")
    assert (await sandbox.exec("chown 1:1 /data/f")).exit_code == 1
    assert await output(sandbox, "stat -c %u:%g /data/f") == "0:0\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (r"$'\xff\xfe'", "Invalid or incomplete multibyte"),
        (r"$'a\nb'", "Invalid argument"),
        (r"'a\b'", "Invalid argument"),
        ("$(printf 'x%.0s' {1..300})", "File name too long"),
    ],
)
async def test_invalid_names(sandbox: Sandbox, name: str, message: str) -> None:
    result = await sandbox.exec(f"cd /data && touch {name}")
    assert result.exit_code == 1
    assert message in result.stderr
    assert await output(sandbox, "ls /data") == ""


async def test_names_with_special_characters_of_urls(sandbox: Sandbox, store: Store) -> None:
    names = ["a b", "50%", "q?x=1", "#1", "ä€", "+", "a=b&c", "'"]
    for name in names:
        await sandbox.exec(["sh", "-c", 'printf %s "$1" > "/data/$1"', "sh", name])
    assert store.keys() == sorted(names)
    assert sorted(await sandbox.readdir("/data")) == sorted(names)


async def test_many_files_are_listed_once_each(sandbox: Sandbox, store: Store) -> None:
    for number in range(1500):
        store[f"many/{number:04}"] = b"x"
    names = await output(sandbox, "ls /data/many; cat /data/many/* | wc -c")
    assert names.split() == [*(f"{number:04}" for number in range(1500)), "1500"]


async def test_git_repository_in_a_bucket(sandbox: Sandbox) -> None:
    log = await output(
        sandbox,
        "cd /data && git init -q r && cd r && echo hi > f && git add f && "
        "git -c user.email=a@b -c user.name=n commit -qm one && git status --short && "
        "git log --format=%s && git fsck",
    )
    assert log == "one\n"


async def test_other_users_in_the_sandbox_have_access(sandbox: Sandbox) -> None:
    if os.geteuid() != 0:
        pytest.skip("sandboxes of an unprivileged engine have one user")
    assert await output(sandbox, "echo mine > /data/f && cat /data/f", user="nobody") == "mine\n"


async def test_file_methods_of_the_engine(sandbox: Sandbox, store: Store) -> None:
    await sandbox.write_file("/data/sub/f.txt", "from outside")
    assert store["sub/f.txt"] == b"from outside"
    assert await sandbox.read_file("/data/sub/f.txt") == "from outside"
    assert await sandbox.glob("/data/**/*.txt") == ["/data/sub/f.txt"]
    await sandbox.rm("/data/sub", recursive=True)
    assert store.keys() == []
    with pytest.raises(PathNotFound):
        await sandbox.read_file("/data/sub/f.txt")


async def test_temporary_files_of_the_engine_are_not_uploaded(
    sandbox: Sandbox, store: Store
) -> None:
    await output(sandbox, "echo half > /data/.smokebox-c0123456789abcdef")
    assert (await output(sandbox, "ls -A /data"), store.keys()) == ("", [])


async def test_prefix_confines_the_mount(host: Host, bucket: Bucket, store: Store) -> None:
    store["inside/x"], store["outside"] = b"x", b"secret"
    sandbox = await host.create("folder")
    await sandbox.mounts.mount(bucket.at(prefix="inside"))
    assert await output(sandbox, "ls /data; ls /data/.. | grep -c outside; true") == "x\n0\n"
    await output(sandbox, "echo 1 > /data/y")
    assert store.keys() == ["inside/x", "inside/y", "outside"]


async def test_read_only_mount(host: Host, bucket: Bucket, store: Store) -> None:
    store["x"] = b"x"
    sandbox = await host.create("reader")
    await sandbox.mounts.mount(bucket.at(read_only=True))
    for command in ("echo 1 > y", "rm x", "mkdir d", "mv x z", "touch x"):
        result = await sandbox.exec(f"cd /data && {command}")
        assert result.exit_code == 1, command
        assert "Read-only file system" in result.stderr
    with pytest.raises(AccessDenied):
        await sandbox.write_file("/data/y", "1")
    assert (await output(sandbox, "cat /data/x"), store.keys()) == ("x", ["x"])


async def test_disk_limit_bounds_pending_writes(host: Host, bucket: Bucket, store: Store) -> None:
    sandbox = await host.create("small", limits={"disk": 200_000_000})
    await sandbox.mounts.mount(bucket.at())
    code = """
import os
first, second = (os.open(name, os.O_CREAT | os.O_RDWR) for name in "ab")
os.truncate(first, 150_000_000)
try:
    os.truncate(second, 150_000_000)
except OSError as error:
    print(error.strerror)
os.unlink("a"); os.unlink("b")
"""
    assert await python(sandbox, code) == "No space left on device\n"
    assert await output(sandbox, "echo fits > /data/f; cat /data/f") == "fits\n"
    assert store.keys() == ["f"]


@pytest.mark.timeout(120)
@pytest.mark.skipif(os.geteuid() != 0, reason="the tests run as an ordinary user")
def test_everything_without_root() -> None:
    rerun_as_nobody(Path(__file__), "not without_root and not large and not many")
