"""Snapshots, forks, and invalid snapshot bytes."""

from __future__ import annotations

import pytest

from smokebox import virtual
from smokebox.errors import BadSnapshot, FileTooLarge, SmokeboxError
from smokebox.sandbox.filesystems.memory import MemoryFilesystem
from smokebox.sandbox.virtual import VirtualLimits
from smokebox.sandbox.virtual.snapshot import FileNode, Snapshot

SCRIPT = r"""
mkdir -p d/e; printf '\xff' > d/bin; echo text > 'a b'; : > empty
ln -s 'a b' link; ln -s nowhere dangling; chmod 751 d/bin; chmod 700 d/e
x='a b'; export Y=2; f() { echo "f $x $Y"; }; arr=(1 2 3); alias q=echo; cd d
"""


async def test_snapshot_restores_files_and_shell_state() -> None:
    sandbox = virtual()
    await sandbox.exec(SCRIPT)
    snapshot = await sandbox.snapshot()
    await sandbox.exec("cd ..; rm -rf d 'a b' link; x=; unset -f f; echo new > new")
    await sandbox.restore(snapshot)
    result = await sandbox.exec('f; echo "${arr[@]} $PWD"; ls ..; stat -c %a bin e')
    assert result.stdout == (
        "f a b 2\n1 2 3 /workspace/d\na b\nd\ndangling\nempty\nlink\n751\n700\n"
    )
    assert await sandbox.read_bytes("d/bin") == b"\xff"
    assert await sandbox.read_file("link") == "text\n"


async def test_snapshot_is_independent_of_its_sandbox() -> None:
    first = virtual(files={"a": "x"})
    await first.exec("n=5")
    snapshot = await first.snapshot()
    await first.aclose()
    other = virtual()
    await other.restore(snapshot)
    assert (await other.exec("cat a; echo $n")).stdout == "x5\n"


async def test_sandbox_that_never_ran_can_be_snapshotted() -> None:
    sandbox = virtual(files={"a": "x"})
    snapshot = await sandbox.snapshot()
    await sandbox.rm("a")
    await sandbox.restore(snapshot)
    assert await sandbox.readdir(".") == ["a"]


async def test_fork_is_independent() -> None:
    sandbox = virtual()
    await sandbox.exec("n=1; echo one > f; g() { cat f; }")
    fork = (await sandbox.fork())[0]
    await fork.exec("n=2; echo two > f")
    await sandbox.exec("echo three >> f")
    assert (await sandbox.exec("g; echo $n")).stdout == "one\nthree\n1\n"
    assert (await fork.exec("g; echo $n")).stdout == "two\n2\n"


async def test_fork_works_after_its_origin_is_closed() -> None:
    sandbox = virtual(files={"a": "x"})
    fork = (await sandbox.fork())[0]
    await sandbox.aclose()
    assert await fork.read_file("a") == "x"


async def test_fork_keeps_lazy_files_lazy_and_a_snapshot_loads_them() -> None:
    loads: list[int] = []

    def load() -> str:
        loads.append(1)
        return "late"

    sandbox = virtual(files={"d/lazy": load})
    await sandbox.exec("mv d e")
    fork = (await sandbox.fork())[0]
    assert loads == []
    assert await fork.read_file("e/lazy") == "late"
    plain = virtual()
    await plain.restore(await sandbox.snapshot())
    assert await plain.read_file("e/lazy") == "late"
    assert len(loads) == 2


async def test_snapshots_exclude_mounts() -> None:
    shared = MemoryFilesystem()
    shared.write("/secret", b"not for snapshots")
    sandbox = virtual(mounts={"/m": shared})
    snapshot = await sandbox.snapshot()
    assert b"not for snapshots" not in snapshot
    fork = (await sandbox.fork())[0]
    assert await fork.read_file("/m/secret") == "not for snapshots"
    await sandbox.restore(snapshot)
    assert await sandbox.read_file("/m/secret") == "not for snapshots"


async def test_fresh_shell_snapshots_files_only() -> None:
    sandbox = virtual(shell="fresh")
    await sandbox.exec("x=1; echo f > f")
    fork = (await sandbox.fork())[0]
    assert (await fork.exec("cat f; echo [$x]")).stdout == "f\n[]\n"


async def test_restoring_keeps_the_options() -> None:
    sandbox = virtual(commands={"hi": lambda call: "hi\n"}, limits={"commands": 50})
    await sandbox.restore(await sandbox.snapshot())
    assert (await sandbox.exec("hi; while :; do :; done")).exit_code == 126


async def test_snapshot_waits_for_the_running_script() -> None:
    sandbox = virtual()
    stream = sandbox.exec_stream("echo on; sleep 0.2; echo done > f")
    assert (await anext(stream)).data == "on\n"
    fork_task = sandbox.fork()
    assert [chunk async for chunk in stream] == []
    assert await (await fork_task)[0].read_file("f") == "done\n"


def _damaged(data: bytes) -> dict[str, bytes]:
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    return {
        "empty": b"",
        "garbage": b"x" * 500,
        "header only": data[:26],
        "cut short": data[:-1],
        "longer": data + b"x",
        "one bit": bytes(changed),
        "other version": data[:8] + b"\x00\x09" + data[10:],
    }


async def test_invalid_snapshot_bytes_are_refused_and_change_nothing() -> None:
    sandbox = virtual(files={"a": "x"})
    await sandbox.exec("n=1")
    for name, data in _damaged(await sandbox.snapshot()).items():
        with pytest.raises(BadSnapshot) as caught:
            await sandbox.restore(data)
        assert caught.value.hint, name
    with pytest.raises(BadSnapshot):
        await sandbox.restore("text")  # type: ignore[arg-type]
    assert (await sandbox.exec("cat a; echo $n")).stdout == "x1\n"


@pytest.mark.parametrize(
    "image",
    [
        {"/a/b": FileNode("file", 0o644, 0.0, b"no parent")},
        {"/a": FileNode("file", 0o644, 0.0), "/a/b": FileNode("file", 0o644, 0.0)},
        {"/a/../b": FileNode("file", 0o644, 0.0)},
        {"relative": FileNode("file", 0o644, 0.0)},
        {"/a": FileNode("device", 0o644, 0.0)},  # type: ignore[arg-type]
    ],
)
async def test_snapshot_with_invalid_values_is_refused(image: dict[str, FileNode]) -> None:
    sandbox = virtual(files={"a": "x"})
    with pytest.raises(BadSnapshot):
        await sandbox.restore(Snapshot(image=image).encode())
    assert await sandbox.read_file("a") == "x"


async def test_invalid_shell_state_is_refused() -> None:
    sandbox = virtual(files={"a": "x"})
    with pytest.raises(BadSnapshot):
        await sandbox.restore(Snapshot(image={}, shell=b"garbage").encode())
    assert await sandbox.read_file("a") == "x"


async def test_snapshot_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    snapshot = await virtual(files={"big": b"x" * 5_000}).snapshot()
    small = virtual(limits=VirtualLimits(file_size=1_000), files={"a": "x"})
    with pytest.raises(FileTooLarge):
        await small.restore(snapshot)
    assert await small.read_file("a") == "x"


async def test_every_error_of_decode_is_a_smokebox_error() -> None:
    snapshot = bytearray(await virtual().snapshot())
    for position in range(0, len(snapshot), 97):
        broken = bytearray(snapshot)
        broken[position] ^= 0xFF
        with pytest.raises(SmokeboxError):
            Snapshot.decode(bytes(broken))
