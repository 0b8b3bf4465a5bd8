"""Information about the host inside: variables, files, names, command lines."""

from __future__ import annotations

import getpass
import os
import pwd
import socket
import uuid
from typing import TYPE_CHECKING

import pytest

from attack.sandbox_code import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from smokebox.engine.sandbox import Sandbox

MARK = f"canary-{uuid.uuid4().hex}"
# Searches every readable file except programs and files that describe the search itself.
SEARCH = r"""
words = [word.encode() for word in json.loads(sys.argv[1])]
found = set()

def check(path, data):
    for word in words:
        if word in data and b"os.walk" not in data:
            found.add(f"{word.decode()} in {path}")

def check_file(path):
    if "/proc/self" in path or f"/proc/{os.getpid()}/" in path:
        return
    try:
        if os.path.isfile(path) and not os.path.islink(path):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                check(path, os.read(fd, 1 << 20))
            finally:
                os.close(fd)
        elif os.path.islink(path):
            check(path, os.readlink(path).encode())
    except OSError:
        pass

for folder, folders, names in os.walk("/"):
    if folder == "/":
        folders.remove("usr")
    if folder == "/proc":
        folders[:] = [name for name in folders if name != str(os.getpid()) and name != "self"]
    if folder.startswith("/proc/") and folder.count("/") > 3:
        folders.clear()
    for name in names + folders:
        check(folder, name.encode())
        check_file(f"{folder}/{name}")
for name in ("environ", "cmdline", "mountinfo", "mounts", "cgroup", "maps", "status", "limits"):
    if name == "cmdline" or not os.path.exists(f"/proc/self/{name}"):
        continue
    data = open(f"/proc/self/{name}", "rb").read()
    if name in ("mountinfo", "mounts"):
        # Known: this line shows the state directory.
        data = b"\n".join(line for line in data.splitlines() if b" /run/smokebox " not in line)
    check(f"self {name}", data)
check("uname", " ".join(os.uname()).encode())
output(sorted(found))
"""


@pytest.fixture(autouse=True)
def _planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plant secrets in the environment, home and working directory of the engine."""
    home = tmp_path / f"home-of-{MARK}"
    home.mkdir()
    (home / ".netrc").write_text(MARK)
    (tmp_path / ".env").write_text(f"API_KEY={MARK}")
    monkeypatch.setenv("SECRET_API_KEY", MARK)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", MARK)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    yield


def host_names() -> list[str]:
    """Return words that must not be found inside."""
    names = [MARK, os.path.realpath(os.path.dirname(__file__)), "smokebox-zygote"]
    if len(socket.gethostname()) > 6:
        names.append(socket.gethostname())
    user = pwd.getpwuid(os.geteuid())
    if user.pw_name not in ("root", "nobody") and len(user.pw_name) > 4:
        names += [user.pw_name, user.pw_dir, getpass.getuser()]
    return names


async def test_secrets_and_names_of_the_host_are_not_found(sandbox: Sandbox) -> None:
    import json

    await sandbox.exec(f"echo {MARK} > /workspace/own")
    assert await run(sandbox, SEARCH, json.dumps(host_names())) == [f"{MARK} in /workspace/own"]


async def test_environment_of_a_command_has_no_variable_of_the_engine(sandbox: Sandbox) -> None:
    found = await sandbox.exec(["env"])
    names = {line.partition("=")[0] for line in found.stdout.splitlines()}
    assert MARK not in found.stdout
    assert not names & {"SECRET_API_KEY", "SMOKEBOX_HOME", "VIRTUAL_ENV", "PYTHONPATH", "OLDPWD"}
    assert {"HOME=/root", "USER=root", "PWD=/workspace"} <= set(found.stdout.splitlines())


async def test_sessions_and_processes_have_no_variable_of_the_engine(sandbox: Sandbox) -> None:
    session = await sandbox.create_session()
    shown = await session.exec("env; cat /proc/$PPID/environ /proc/1/environ")
    assert MARK not in shown.stdout
    process = await sandbox.start_process("env; ls -l /proc/self/fd")
    await process.wait_for_exit(10)
    logs = (await process.logs()).stdout
    assert "HOME=/root" in logs
    assert MARK not in logs


async def test_memory_of_guest_init_holds_no_secret(sandbox: Sandbox, tier: str) -> None:
    """It is a copy of the zygote's memory, which holds no secret either."""
    if os.geteuid() != 0 or tier != "namespaces":
        pytest.skip("only root on the host can read the memory of guest init")
    async with sandbox.lifecycle.use() as run:
        pid = run.jail.state.pid
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            span, rights, *_ = line.split()
            start, end = (int(word, 16) for word in span.split("-"))
            if rights.startswith("rw") and "[v" not in line:
                memory.seek(start)
                assert MARK.encode() not in memory.read(end - start)
