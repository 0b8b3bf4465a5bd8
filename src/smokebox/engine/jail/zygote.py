"""The zygote: a small process with one thread, which jails are forked from.

It is started by `namespaces`, and serves one request after the other: clone into fresh
namespaces, give the child its ids and its layers, answer with its pid. What the child then
does is in `cell`, and it tells the engine of that by a socket of its own. A zygote whose
engine is gone ends; the jails it made do not.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys

from smokebox.engine.jail import linux, network, seccomp
from smokebox.engine.jail.kernfs import write
from smokebox.engine.jail.namespace_setup import (
    MESSAGE_SIZE,
    NAMESPACES,
    JailRequest,
    NamespaceSetup,
)
from smokebox.runtime.supervisor import receive_fds

# What comes with a request: the socket to the engine, the one that the agent listens on, and
# perhaps a lock on its ids and a cgroup to be born in.
SETUP, LISTENER, REQUIRED = 0, 1, 2


def main() -> None:
    """Serve the engine at the other end of the socket whose number is in argv."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    linux.set_process_name("smokebox-zygote")
    # A sandbox sees the command line of its first process: no path of the host's.
    linux.set_command_line("smokebox")
    # Nobody asks for the status of a jail: its end is seen by pidfd.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    seccomp.profile()
    network.prepare()
    gc.collect()
    gc.freeze()
    while True:
        message, fds = receive_fds(control, MESSAGE_SIZE, 8)
        if not message:
            return
        serve(control, json.loads(message), fds)


def serve(control: socket.socket, words: dict[str, object], fds: list[int]) -> None:
    """Make one jail and answer with its pid and a pidfd, or with what kept it from being made."""
    request = JailRequest(words)
    try:
        pid, pidfd = make(control, request, fds, in_cgroup=bool(words.get("cgroup")))
    except OSError as error:
        answer: dict[str, object] = {
            "key": request.key,
            "error": error.errno or 0,
            "text": str(error),
        }
        control.send(json.dumps(answer).encode())
    else:
        socket.send_fds(control, [json.dumps({"key": request.key, "pid": pid}).encode()], [pidfd])
        os.close(pidfd)
    finally:
        for fd in fds:
            os.close(fd)


def make(
    control: socket.socket, request: JailRequest, fds: list[int], *, in_cgroup: bool
) -> tuple[int, int]:
    """Clone a cell and hand it its ids; its pid and a pidfd."""
    if len(fds) < REQUIRED:
        raise OSError(24, "descriptors were lost on the way: too many open files")
    go, theirs = socket.socketpair()
    cgroup = fds.pop() if in_cgroup else None
    try:
        kind = setup_of(request)
        cloned = linux.clone3(NAMESPACES, cgroup=cgroup)
        if not cloned.pid:
            if cgroup is not None:
                os.close(cgroup)
            become(kind, control, request, fds, go, theirs)
    finally:
        theirs.close()
        if cgroup is not None:
            os.close(cgroup)
    try:
        with go:
            hand_over(cloned.pid, request, go)
    except BaseException:
        signal.pidfd_send_signal(cloned.pidfd, signal.SIGKILL)
        os.close(cloned.pidfd)
        raise
    return cloned.pid, cloned.pidfd


def setup_of(request: JailRequest) -> type[NamespaceSetup]:
    """What the child is to be, by the tier; loaded here once, for all that are forked."""
    if request.tier != "gvisor":
        return NamespaceSetup
    from smokebox.engine.jail.gvisor_setup import GvisorSetup

    return GvisorSetup


def become(
    kind: type[NamespaceSetup],
    control: socket.socket,
    request: JailRequest,
    fds: list[int],
    go: socket.socket,
    theirs: socket.socket,
) -> None:
    """Be the child, and never return."""
    try:
        control.close()
        go.close()
        kind(
            request,
            setup=socket.socket(fileno=fds[SETUP]),
            listener=socket.socket(fileno=fds[LISTENER]),
        ).live(theirs)
    finally:
        os._exit(1)


def hand_over(pid: int, request: JailRequest, go: socket.socket) -> None:
    """Map the child's ids, and its layers by them, and let it go on."""
    if not request.mapped:
        write(f"/proc/{pid}/setgroups", "deny")
    write(f"/proc/{pid}/uid_map", f"0 {request.first_uid} {request.uids}")
    gid = request.first_uid if request.mapped else os.getegid()
    write(f"/proc/{pid}/gid_map", f"0 {gid} {request.uids}")
    trees: list[int] = []
    try:
        if request.mapped:
            trees = map_layers(pid, request)
        socket.send_fds(go, [b"go"], trees)
    finally:
        for tree in trees:
            os.close(tree)


def map_layers(pid: int, request: JailRequest) -> list[int]:
    """Detached copies of what the jail is made of, with ids as the child sees them."""
    userns = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    trees: list[int] = []
    try:
        trees.append(linux.open_tree(f"{request.directory}/data"))
        linux.mount_setattr(trees[-1], 0, userns=userns)
        for path, _ in request.layers:
            trees.append(linux.open_tree(path))
            linux.mount_setattr(trees[-1], linux.ATTR_RDONLY, userns=userns)
    except OSError:
        for tree in trees:
            os.close(tree)
        raise
    finally:
        os.close(userns)
    return trees


if __name__ == "__main__":
    main()
