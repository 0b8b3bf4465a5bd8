"""The process that serves one mounted bucket, beside the sandbox and as its user outside.

It outlives the engine, and ends when nobody has the bucket mounted any more. Credentials
reach it on its standard input, and leave it only as signatures.
"""

from __future__ import annotations

# Looked for when a name is first resolved, by when this process may not read it any more.
import encodings.idna  # noqa: F401
import errno
import json
import os
import socket
import sys
from typing import Any

import msgspec

from smokebox.engine.jail import linux
from smokebox.engine.mounts.attaching import Attaching, Place, detach
from smokebox.engine.mounts.draft import Spool
from smokebox.engine.mounts.serving import Server
from smokebox.engine.mounts.volume import Volume
from smokebox.engine.mounts.way import check_public, lead_outside
from smokebox.errors import Conflict, SmokeboxError
from smokebox.sandbox.access import Access
from smokebox.sandbox.filesystems.bucket import BucketFilesystem
from smokebox.sandbox.filesystems.filesystem import from_os_error
from smokebox.sandbox.stores import open_target
from smokebox.wire.failure import failure_of

CACHE_BYTES = 32 << 20
# How long what was listed is believed, in seconds.
HOLDS = 5.0


def main() -> None:
    """Do what the message on standard input says, and say how that went."""
    words = json.loads(sys.stdin.buffer.read())
    with socket.socket(fileno=words["report"]) as report:
        try:
            if words["task"] == "unmount":
                detach(_place(words), lazy=words["lazy"])
                report.send(b"{}")
                return
            # The process that was started ends, so that the engine need not wait for this one.
            if os.fork():
                return
            server, volume = _mount(words)
            report.send(json.dumps({"pid": os.getpid()}).encode())
        except SmokeboxError as error:
            _refuse(report, error)
            return
        except OSError as error:
            _refuse(report, _explained(error, words["path"]))
            return
    server.run(volume)
    os._exit(0)


def _mount(words: dict[str, Any]) -> tuple[Server, Volume]:
    linux.set_process_name("smokebox-mount")
    attaching = Attaching(_place(words), read_only=words["read_only"])
    try:
        if words["mapped"]:
            os.setgroups([])
            os.setresgid(words["gid"], words["gid"], words["gid"])
            os.setresuid(words["uid"], words["uid"], words["uid"])
        linux.set_dumpable(False)
        if not words["private"]:
            check_public(words["access"]["endpoint"])
            lead_outside()
        target = open_target(words["bucket"], words["prefix"], Access(**words["access"]))
        bucket = BucketFilesystem(
            target.store,
            target.prefix,
            read_only=words["read_only"],
            cache_bytes=CACHE_BYTES,
            place=target.place,
        )
        if words["check"]:
            bucket.refresh()
        bucket.serve(HOLDS)
    except BaseException:
        attaching.leave()
        raise
    # Inside, root of the sandbox; outside, who that is there.
    uid, gid = (words["uid"], words["gid"]) if words["mapped"] else (0, 0)
    server = Server(attaching.make(), uid=uid, gid=gid)
    spool = Spool(words["spool"], words["room"])
    return server, Volume(bucket, spool, server.invalidate)


def _place(words: dict[str, Any]) -> Place:
    return Place(
        user=words["user"],
        mounts=words["mounts"],
        root=words["root"],
        path=words["path"],
        mapped=words["mapped"],
    )


def _explained(error: OSError, path: str) -> SmokeboxError:
    if error.errno == errno.EBUSY:
        return Conflict(
            f"{path} is in use in the sandbox.",
            hint="End what has files open or works there, or pass force=True.",
            kind="mount",
            name=path,
        )
    return from_os_error(error, path)


def _refuse(report: socket.socket, error: SmokeboxError) -> None:
    report.send(msgspec.json.encode(failure_of(error)))
