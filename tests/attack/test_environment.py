"""What could be learned of the host from inside: variables, files, names, command lines."""

from __future__ import annotations

import getpass
import os
import pwd
import socket
import uuid
from typing import TYPE_CHECKING

import pytest

from attack.inside import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from smokebox.engine.sandbox import Sandbox

MARK = f"canary-{uuid.uuid4().hex}"
# Everything that can be read, but for programs and for what the kernel makes up of itself.
SEARCH = r"""
words = [word.encode() for word in json.loads(sys.argv[1])]
found = set()

def look(path, data):
    for word in words:
        if word in data and b"os.walk" not in data:
            found.add(f"{word.decode()} in {path}")

def peek(path):
    if "/proc/self" in path or f"/proc/{os.getpid()}/" in path:
        return
    try:
        if os.path.isfile(path) and not os.path.islink(path):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                look(path, os.read(fd, 1 << 20))
            finally:
                os.close(fd)
        elif os.path.islink(path):
            look(path, os.readlink(path).encode())
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
        look(folder, name.encode())
        peek(f"{folder}/{name}")
for name in ("environ", "cmdline", "mountinfo", "mounts", "cgroup", "maps", "status", "limits"):
    if name == "cmdline" or not os.path.exists(f"/proc/self/{name}"):
        continue
    data = open(f"/proc/self/{name}", "rb").read()
    if name in ("mountinfo", "mounts"):
        # Known: where the state directory is.
        data = b"\n".join(line for line in data.splitlines() if b" /run/smokebox " not in line)
    look(f"self {name}", data)
look("uname", " ".join(os.uname()).encode())
tell(sorted(found))
"""


@pytest.fixture(autouse=True)
def _planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Secrets where an engine has them: in its environment, its home and its directory."""
    home = tmp_path / f"home-of-{MARK}"
    home.mkdir()
    (home / ".netrc").write_text(MARK)
    (tmp_path / ".env").write_text(f"API_KEY={MARK}")
    monkeypatch.setenv("SECRET_API_KEY", MARK)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", MARK)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    yield


def words() -> list[str]:
    """What would betray the host."""
    own = [MARK, os.path.realpath(os.path.dirname(__file__)), "smokebox-zygote"]
    if len(socket.gethostname()) > 6:
        own.append(socket.gethostname())
    user = pwd.getpwuid(os.geteuid())
    if user.pw_name not in ("root", "nobody") and len(user.pw_name) > 4:
        own += [user.pw_name, user.pw_dir, getpass.getuser()]
    return own


async def test_no_secret_or_name_of_the_host_is_seen(sandbox: Sandbox) -> None:
    import json

    await sandbox.exec(f"echo {MARK} > /workspace/own")
    assert await run(sandbox, SEARCH, json.dumps(words())) == [f"{MARK} in /workspace/own"]


async def test_the_environment_of_a_command_is_made_up(sandbox: Sandbox) -> None:
    found = await sandbox.exec(["env"])
    names = {line.partition("=")[0] for line in found.stdout.splitlines()}
    assert MARK not in found.stdout
    assert not names & {"SECRET_API_KEY", "SMOKEBOX_HOME", "VIRTUAL_ENV", "PYTHONPATH", "OLDPWD"}
    assert {"HOME=/root", "USER=root", "PWD=/workspace"} <= set(found.stdout.splitlines())


async def test_sessions_and_processes_get_no_more_of_it(sandbox: Sandbox) -> None:
    session = await sandbox.create_session()
    shown = await session.exec("env; cat /proc/$PPID/environ /proc/1/environ")
    assert MARK not in shown.stdout
    process = await sandbox.start_process("env; ls -l /proc/self/fd")
    await process.wait_for_exit(10)
    logs = (await process.logs()).stdout
    assert "HOME=/root" in logs
    assert MARK not in logs


async def test_the_agents_memory_holds_no_secret(sandbox: Sandbox, tier: str) -> None:
    """It is a copy of the zygote's, and the zygote was told nothing: as root we can look."""
    if os.geteuid() != 0 or tier != "namespaces":
        pytest.skip("only root on the host can look into the agent")
    async with sandbox.life.use() as running:
        pid = running.jail.state.pid
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            span, rights, *_ = line.split()
            start, end = (int(word, 16) for word in span.split("-"))
            if rights.startswith("rw") and "[v" not in line:
                memory.seek(start)
                assert MARK.encode() not in memory.read(end - start)
