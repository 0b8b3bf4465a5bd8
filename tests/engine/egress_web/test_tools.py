"""Real programs in a real sandbox use a token that is nowhere in the sandbox."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from engine.egress_web.registries import ECHO, GIT, NPM, PYTHON, Registries
from engine.egress_web.standalone_proxy import http_server, server_tls
from smokebox.egress.policy import Egress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from smokebox.egress.handler import HandlerContext
    from smokebox.egress.message import Request
    from smokebox.engine.egress.authority import Authority
    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

HOSTS = (GIT, PYTHON, NPM, ECHO)
# Keeps responses in memory until its stdin is closed.
READER = """
import ssl, sys, urllib.request
responses = [urllib.request.urlopen(f"https://{host}/") for host in sys.argv[1:]]
kept = [(dict(one.headers), one.read()) for one in responses]
print("received", flush=True)
sys.stdin.read()
"""


async def add_token(request: Request, env: Any, context: HandlerContext) -> Request:
    request.headers["authorization"] = f"Bearer {env.COMPANY_TOKEN}"
    return request


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    value = f"tok_{secrets.token_hex(16)}"
    monkeypatch.setenv("COMPANY_TOKEN", value)
    return value


@pytest_asyncio.fixture
async def registries(
    tmp_path: Path, authority: Authority, token: str
) -> AsyncIterator[tuple[Registries, str]]:
    """Run the servers, and yield them with their address."""
    (tmp_path / "company").mkdir()
    registries = Registries(tmp_path / "company", token)
    async with http_server(registries.respond, server_tls(authority)) as address:
        yield registries, address


@pytest_asyncio.fixture
async def sandbox(host: Host, registries: tuple[Registries, str]) -> Sandbox:
    """Return a sandbox that reaches the servers through a handler that adds the token."""
    return await host.create("box", egress=make_policy(registries[1]))


def make_policy(address: str) -> Egress:
    return Egress(
        outbound_by_host=dict.fromkeys(HOSTS, add_token), hosts=dict.fromkeys(HOSTS, address)
    )


async def run(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.exec(command)
    assert result.exit_code == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def require(program: str) -> None:
    if shutil.which(program, path="/usr/bin:/bin") is None:
        pytest.skip(f"there is no {program} on this machine: apt-get install -y {program}")


async def test_git_clones(sandbox: Sandbox, registries: tuple[Registries, str]) -> None:
    require("git")
    output = await run(sandbox, f"git clone -q https://{GIT}/tiny.git && cat tiny/README")
    assert output == "a tiny repository\n"
    assert f"{GIT}/tiny.git/git-upload-pack" in registries[0].seen


async def test_pip_installs(sandbox: Sandbox) -> None:
    require("pip3")
    pip = "pip3 install -q --disable-pip-version-check --break-system-packages --no-cache-dir"
    await run(sandbox, f"{pip} --target site --index-url https://{PYTHON}/simple tiny")
    output = await run(sandbox, "PYTHONPATH=site python3 -c 'import tiny; print(tiny.WORD)'")
    assert output == "a tiny module\n"


async def test_npm_installs(sandbox: Sandbox) -> None:
    require("npm")
    npm = "npm install --silent --no-audit --no-fund --no-update-notifier"
    await run(sandbox, f"{npm} --registry https://{NPM}/ tiny")
    assert await run(sandbox, "node -p 'require(\"tiny\")'") == "a tiny package\n"


async def test_curl_and_node_trust_the_proxy(sandbox: Sandbox) -> None:
    require("node")
    assert "[redacted]" in await run(sandbox, f"curl -sS https://{ECHO}/")
    fetch = f"fetch('https://{ECHO}/').then(r => console.log(r.status))"
    assert await run(sandbox, f'node -e "{fetch}"') == "200\n"


async def start_reader(sandbox: Sandbox) -> list[int]:
    """Start a program that keeps a response in memory; return the host pids of the sandbox."""
    reader = await sandbox.start_process(["python3", "-c", READER, ECHO], stdin=True)
    await reader.wait_for_log("received")
    pids = list(processes_beside(f"-c\0{READER}"))
    assert len(pids) >= 2
    return pids


async def test_token_is_nowhere_in_the_sandbox(
    sandbox: Sandbox, token: str, tmp_path: Path
) -> None:
    pids = await start_reader(sandbox)
    shown = await run(
        sandbox,
        f"env; cat /proc/*/environ /proc/*/cmdline; curl -sSi https://{ECHO}/; "
        f"curl -sSi -X TRACE https://{ECHO}/; getent hosts {ECHO}; "
        "grep -rh tok_ /etc/ssl /root /tmp /workspace; true",
    )
    assert shown.lower().count("x-seen") == 2
    assert "[redacted]" in shown
    assert token not in shown
    found = {pid: memory_has(pid, token.encode()) for pid in pids}
    assert not any(found.values()), found
    assert os.geteuid() != 0 or None not in found.values()
    assert not any(token in _text(f"/proc/{pid}/environ") for pid in pids)
    assert not files_with(tmp_path / "home", token.encode())
    events = await (await sandbox.network.audit_log()).read()
    assert len(events) >= 3
    assert token not in str(events)


async def test_token_is_found_in_the_sandbox_without_scrubbing(
    sandbox: Sandbox, registries: tuple[Registries, str], token: str
) -> None:
    await sandbox.network.configure(replace(make_policy(registries[1]), scrub=False))
    found = [memory_has(pid, token.encode()) for pid in await start_reader(sandbox)]
    assert True in found or None in found


def processes_beside(marker: str) -> Iterator[int]:
    """Yield the processes in the pid namespace of the one whose command line has `marker`."""
    found = [pid for pid in _pids() if marker in _text(f"/proc/{pid}/cmdline")]
    namespaces = {_namespace(pid) for pid in found} - {_namespace(os.getpid()), ""}
    return (pid for pid in _pids() if _namespace(pid) in namespaces)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def _namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def memory_has(pid: int, secret: bytes) -> bool | None:
    """Return whether the memory of a process has these bytes; None if it cannot be read."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for line in _text(f"/proc/{pid}/maps").splitlines():
                span, rights, *rest = line.split()
                if "r" not in rights or rest[-1] in ("[vvar]", "[vsyscall]"):
                    continue
                begin, end = (int(part, 16) for part in span.split("-"))
                with contextlib.suppress(OSError, ValueError):
                    memory.seek(begin)
                    if secret in memory.read(end - begin):
                        return True
    except PermissionError:
        return None
    except OSError:
        return False
    return False


def files_with(folder: Path, secret: bytes) -> list[Path]:
    """Return the files below a folder that contain these bytes."""
    found = []
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if file.is_file() and not file.is_symlink() and secret in file.read_bytes():
                found.append(file)
    return found
