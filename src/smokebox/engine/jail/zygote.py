"""The zygote: a small single-threaded process that jails are forked from.

`zygote_client` starts it. It serves one request after the other: clone into new namespaces, map
the child's ids and layers, respond with its pid. The child continues in `namespace_setup`, and
reports to the engine through another socket. A zygote exits when its engine is gone; its
jails keep running.
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
    IN_FILE,
    MESSAGE_SIZE,
    NAMESPACES,
    JailRequest,
    NamespaceSetup,
    send_trees,
)
from smokebox.runtime.supervisor import receive_fds

# Descriptors of a request: the socket to the engine, the one that guest init listens on, and
# possibly some of the tier, a lock on the ids, and a cgroup to clone into.
SETUP, LISTENER, REQUIRED = 0, 1, 2
_MOST_FDS = 8


def main() -> None:
    """Serve the engine at the other end of the socket whose number is in argv."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    linux.set_process_name("smokebox-zygote")
    # A sandbox sees the command line of its first process: no paths of the host.
    linux.set_command_line("smokebox")
    # Jails are watched by pidfd, not reaped here.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    seccomp.profile()
    network.prepare()
    gc.collect()
    gc.freeze()
    while True:
        message, fds = receive_fds(control, MESSAGE_SIZE, _MOST_FDS)
        if not message:
            return
        if message == IN_FILE:
            message = read_file(fds.pop())
        serve(control, json.loads(message), fds)


def read_file(fd: int) -> bytes:
    """Return the content of a file in memory, and close it."""
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


def serve(control: socket.socket, fields: dict[str, object], fds: list[int]) -> None:
    """Fork one jail and respond with its pid and a pidfd, or with the error."""
    request = JailRequest(fields)
    response: dict[str, object] = {"key": request.key}
    try:
        cloned = fork_jail(control, request, fds, in_cgroup=bool(fields["cgroup"]))
    except OSError as error:
        response |= {"error": error.errno or 0, "text": str(error)}
        control.send(json.dumps(response).encode())
    else:
        response["pid"] = cloned.pid
        socket.send_fds(control, [json.dumps(response).encode()], [cloned.pidfd])
        os.close(cloned.pidfd)
    finally:
        for fd in fds:
            os.close(fd)


def fork_jail(
    control: socket.socket, request: JailRequest, fds: list[int], *, in_cgroup: bool
) -> linux.CloneResult:
    """Clone the first process of a jail and map its ids."""
    if len(fds) < REQUIRED:
        raise OSError(24, "descriptors were lost in transfer: too many open files")
    go, child_go = socket.socketpair()
    cgroup = fds.pop() if in_cgroup else None
    try:
        setup = setup_class(request.tier)
        cloned = linux.clone3(NAMESPACES, cgroup=cgroup)
        if not cloned.pid:
            if cgroup is not None:
                os.close(cgroup)
            run_child(setup, control, request, fds, go, child_go)
    finally:
        child_go.close()
        if cgroup is not None:
            os.close(cgroup)
    try:
        with go:
            map_child(cloned.pid, request, go)
    except BaseException:
        signal.pidfd_send_signal(cloned.pidfd, signal.SIGKILL)
        os.close(cloned.pidfd)
        raise
    return cloned


def setup_class(tier: str) -> type[NamespaceSetup]:
    """Return the set-up of a tier, imported here once for all children."""
    if tier != "gvisor":
        return NamespaceSetup
    from smokebox.engine.jail.gvisor_setup import GvisorSetup

    return GvisorSetup


def run_child(
    setup: type[NamespaceSetup],
    control: socket.socket,
    request: JailRequest,
    fds: list[int],
    go: socket.socket,
    child_go: socket.socket,
) -> None:
    """Run the child. Never returns."""
    try:
        control.close()
        go.close()
        setup(
            request,
            setup=socket.socket(fileno=fds[SETUP]),
            listener=socket.socket(fileno=fds[LISTENER]),
        ).run(child_go)
    finally:
        os._exit(1)


def map_child(pid: int, request: JailRequest, go: socket.socket) -> None:
    """Map the child's ids and layers, and let it continue."""
    if not request.mapped:
        write(f"/proc/{pid}/setgroups", "deny")
    write(f"/proc/{pid}/uid_map", f"0 {request.first_uid} {request.uids}")
    gid = request.first_uid if request.mapped else os.getegid()
    write(f"/proc/{pid}/gid_map", f"0 {gid} {request.uids}")
    trees: list[int] = []
    try:
        if request.mapped:
            trees = map_layers(pid, request)
        send_trees(go, trees)
    finally:
        for tree in trees:
            os.close(tree)


def map_layers(pid: int, request: JailRequest) -> list[int]:
    """Return detached mounts of the upper layer and the image layers, with the child's ids."""
    maps = {0: os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)}
    trees: list[int] = []
    try:
        trees.append(linux.open_tree(f"{request.directory}/data"))
        linux.mount_setattr(trees[-1], 0, userns=maps[0])
        for layer in request.layers:
            if layer.owner not in maps:
                maps[layer.owner] = make_map(layer.owner, request)
            trees.append(linux.open_tree(layer.path))
            linux.mount_setattr(trees[-1], linux.ATTR_RDONLY, userns=maps[layer.owner])
    except OSError:
        for tree in trees:
            os.close(tree)
        raise
    finally:
        for userns in maps.values():
            os.close(userns)
    return trees


def make_map(owner: int, request: JailRequest) -> int:
    """Return a user namespace that maps ids from `owner` on to those of the jail."""
    zygote = os.getpid()
    holder = linux.clone3(linux.NEWUSER)
    if not holder.pid:
        hold_namespace(zygote)
    try:
        for name in ("uid_map", "gid_map"):
            write(f"/proc/{holder.pid}/{name}", f"{owner} {request.first_uid} {request.uids}")
        return os.open(f"/proc/{holder.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        signal.pidfd_send_signal(holder.pidfd, signal.SIGKILL)
        os.close(holder.pidfd)


def hold_namespace(parent: int) -> None:
    """Wait until the parent kills this process, or ends. Never returns."""
    try:
        linux.end_with_parent()
        while os.getppid() == parent:
            signal.pause()
    finally:
        os._exit(1)
