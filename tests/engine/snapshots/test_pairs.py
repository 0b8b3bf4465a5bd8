"""Snapshots, restores and forks together with mounts, code, terminals, egress and images."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from building import build, build_base
from engine.mounts.conftest import bucket, store
from engine.terminals.viewer import open_viewer
from smokebox.egress.message import Response
from smokebox.errors import NotFound, SandboxGone, SmokeboxError, Unsupported

if TYPE_CHECKING:
    from engine.mounts.conftest import Bucket
    from engine.mounts.store import Store
    from smokebox.egress.handler import HandlerContext
    from smokebox.egress.message import Request
    from smokebox.engine.host import Host

__all__ = ["bucket", "store"]


async def greet(request: Request, env: object, context: HandlerContext) -> Response:
    return Response("hello")


async def test_a_mounted_bucket_is_no_part_of_a_snapshot(
    host: Host, bucket: Bucket, store: Store
) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("mkdir /data; echo below > /data/below; echo 1 > own")
    await sandbox.mounts.mount(bucket.at())
    await sandbox.exec("echo shared > /data/shared; echo 1 > /data/kept")
    snapshot = await sandbox.snapshots.create()
    (fork,) = await host.fork("box", ids=["copy"])
    # What was there before it was mounted, and no mount: its credentials are not copied.
    assert (await fork.exec("cat /data/* own")).stdout == "below\n1\n"
    assert await fork.mounts.list() == []
    await fork.mounts.mount(bucket.at())
    assert (await fork.exec("cat /data/shared")).stdout == "shared\n"
    await sandbox.exec("rm /data/kept; echo 2 > own")
    await sandbox.snapshots.restore(snapshot.id)
    # The bucket is mounted again, and has what was written to it last.
    assert (await sandbox.exec("cat own; ls /data")).stdout == "1\nshared\n"
    assert store.keys() == ["shared"]


async def test_code_contexts_go_on_during_a_snapshot_and_end_with_a_restore(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.contexts.run("x = 1; open('f', 'w').write('1')")
    running = asyncio.create_task(
        sandbox.contexts.run("import time\nfor _ in range(20): x += 1; time.sleep(0.02)\nx")
    )
    snapshot = await sandbox.snapshots.create()
    (fork,) = await host.fork("box", ids=["copy"])
    assert (await running).text == "21"
    assert await fork.contexts.list() == []
    # It has the files of the source, and not the names.
    assert (await fork.contexts.run("open('f').read()")).text == "'1'"
    assert (await fork.contexts.run("x")).error is not None
    context = await sandbox.contexts.create(language="python")
    await sandbox.snapshots.restore(snapshot.id)
    with pytest.raises(SmokeboxError) as ended:
        await sandbox.contexts.run("1", context=context.id)
    assert ended.value.code in ("sandbox_restarted", "not_found")
    assert (await sandbox.contexts.run("open('f').read()")).text == "'1'"


async def test_code_that_runs_during_a_restore_is_told(host: Host) -> None:
    sandbox = await host.create("box")
    snapshot = await sandbox.snapshots.create()
    code = "open('started', 'w').close()\nimport time\ntime.sleep(60)"
    running = asyncio.create_task(sandbox.contexts.run(code))
    async with asyncio.timeout(15):
        while not await sandbox.exists("started"):
            await asyncio.sleep(0.02)
    await sandbox.snapshots.restore(snapshot.id)
    with pytest.raises(SandboxGone):
        await running


async def test_a_terminal_goes_on_during_a_snapshot_and_ends_with_a_restore(host: Host) -> None:
    sandbox = await host.create("box")
    terminal = await sandbox.terminals.create(command=["bash", "--norc"])
    async with open_viewer(terminal) as viewer:
        await viewer.send("v=before; echo $v > f\n")
        snapshot = await sandbox.snapshots.create()
        await viewer.send("echo $((40 + 2))-$v\n")
        await viewer.expect("42-before")
        (fork,) = await host.fork("box", ids=["copy"])
        assert await fork.terminals.list() == []
        with pytest.raises(NotFound):
            await fork.terminals.get(terminal.id)
        await sandbox.snapshots.restore(snapshot.id)
        await viewer.read_all()
    assert not terminal.running


async def test_a_fork_has_the_policy_and_serves_no_function_of_its_source(host: Host) -> None:
    sandbox = await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    curl = "curl -sS --max-time 10 https://api.test/"
    assert (await sandbox.exec(curl)).stdout == "hello"
    snapshot = await sandbox.snapshots.create()
    (fork,) = await host.fork("box", ids=["copy"])
    # A function stays with the sandbox that it was passed for: until it is passed again, no
    # request leaves.
    assert "hello" not in (await fork.exec(curl)).stdout
    await host.create("copy", egress={"outbound_by_host": {"api.test": greet}})
    again = await fork.exec(curl)
    # The proxy of the fork has an authority of its own, which its programs trust.
    assert again.stdout == "hello", again.stderr
    await sandbox.network.deny_host("api.test")
    await sandbox.snapshots.restore(snapshot.id)
    # The policy is a setting, which a restore leaves as it is.
    assert not (await sandbox.exec(curl)).success
    other = await host.create("other", snapshot=snapshot.id)
    assert not (await other.exec(curl)).success
    assert (await other.capabilities()).network == "off"


async def test_a_sandbox_of_a_built_image_is_restored_and_forked(host: Host) -> None:
    await build_base(host)
    built = await build(
        host,
        "FROM base:1\nRUN mkdir /app && echo built > /app/f\nENV WHO=app\nWORKDIR /app\n",
        names=("app:1",),
    )
    sandbox = await host.create("box", image="app:1")
    assert (await sandbox.exec("cat f; rm f; echo own > g; pwd")).stdout == "built\n/app\n"
    snapshot = await sandbox.snapshots.create()
    (fork,) = await host.fork("box", ids=["copy"])
    listing = "ls /app; cat g; echo $WHO; pwd"
    assert (await fork.exec(listing)).stdout == "g\nown\napp\n/app\n"
    # The name may move: sandboxes and snapshots have the image that they were made of.
    await build(host, "FROM base:1\nRUN mkdir /app && echo other > /app/h\n", names=("app:1",))
    await sandbox.exec("echo changed > g")
    await sandbox.snapshots.restore(snapshot.id)
    assert (await sandbox.exec(listing)).stdout == "g\nown\napp\n/app\n"
    created = await host.create("new", snapshot=snapshot.id)
    assert (await created.exec(listing)).stdout == "g\nown\napp\n/app\n"
    info = await created.info()
    assert info is not None
    assert built.digest is not None
    diff = await sandbox.snapshots.diff(snapshot.id)
    assert (diff.added, diff.changed, diff.removed) == ([], [], [])


async def test_processes_are_not_copied_on_any_tier(host: Host) -> None:
    await host.create("box")
    with pytest.raises(Unsupported, match="not its processes") as refused:
        await host.fork("box", memory=True)
    assert "start the processes again" in refused.value.hint


async def test_a_checkpoint_of_a_sandbox_with_all_of_it(
    host: Host, bucket: Bucket, store: Store
) -> None:
    """The parts do not stop a checkpoint, and are not stopped by one."""
    sandbox = await host.create("box", checkpoints=1)
    await sandbox.mounts.mount(bucket.at())
    terminal = await sandbox.terminals.create(command=["bash", "--norc"])
    await sandbox.contexts.run("x = 1")
    session = await sandbox.create_session("s")
    await session.exec("cd /tmp; v=1; echo 1 > /workspace/f")
    async with asyncio.timeout(15):
        while not (made := await host.snapshots.list(sandbox_id="box")):
            await asyncio.sleep(0.05)
    await sandbox.exec("echo 1 > /data/f")
    assert (await sandbox.contexts.run("x")).text == "1"
    assert (await session.exec("pwd; echo $v")).stdout == "/tmp\n1\n"
    assert terminal.running
    created = await host.create("copy", snapshot=made[0].id)
    assert await created.read_file("/workspace/f") == "1\n"
