"""Real programs in a real sandbox, with a token that they use and nobody in it can find."""

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

from engine.egress_web.doors import serving
from engine.egress_web.registries import ECHO, GIT, NPM, PYTHON, Registries
from smokebox.egress.policy import Egress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from engine.egress_web.doors import Authority
    from smokebox.egress.handler import HandlerContext
    from smokebox.egress.message import Request
    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

HOSTS = (GIT, PYTHON, NPM, ECHO)
# Holds what it heard until it is told to stop.
LISTENER = """
import ssl, sys, urllib.request
heard = [urllib.request.urlopen(f"https://{host}/") for host in sys.argv[1:]]
kept = [(dict(one.headers), one.read()) for one in heard]
print("heard", flush=True)
sys.stdin.read()
"""


async def add_token(request: Request, env: Any, context: HandlerContext) -> Request:
    request.headers["authorization"] = f"Bearer {env.COMPANY_TOKEN}"
    return request


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    made = f"tok_{secrets.token_hex(16)}"
    monkeypatch.setenv("COMPANY_TOKEN", made)
    return made


@pytest_asyncio.fixture
async def registries(
    tmp_path: Path, authority: Authority, token: str
) -> AsyncIterator[tuple[Registries, str]]:
    """The servers, and where they are."""
    (tmp_path / "company").mkdir()
    made = Registries(tmp_path / "company", token)
    context = authority.context_of(*HOSTS)
    async with serving(made.answer, context) as address:
        yield made, address


@pytest_asyncio.fixture
async def box(host: Host, registries: tuple[Registries, str]) -> Sandbox:
    """A sandbox that reaches them by a handler that adds the token."""
    return await host.create("box", egress=policy_for(registries[1]))


def policy_for(address: str) -> Egress:
    return Egress(
        outbound_by_host=dict.fromkeys(HOSTS, add_token), hosts=dict.fromkeys(HOSTS, address)
    )


async def run(box: Sandbox, command: str) -> str:
    result = await box.exec(command)
    assert result.exit_code == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def needs(program: str) -> None:
    if shutil.which(program, path="/usr/bin:/bin") is None:
        pytest.skip(f"there is no {program} on this machine: apt-get install -y {program}")


async def test_git_clones(box: Sandbox, registries: tuple[Registries, str]) -> None:
    needs("git")
    said = await run(box, f"git clone -q https://{GIT}/tiny.git && cat tiny/README")
    assert said == "a tiny repository\n"
    assert f"{GIT}/tiny.git/git-upload-pack" in registries[0].seen


async def test_pip_installs(box: Sandbox) -> None:
    needs("pip3")
    pip = "pip3 install -q --disable-pip-version-check --break-system-packages --no-cache-dir"
    await run(box, f"{pip} --target site --index-url https://{PYTHON}/simple tiny")
    said = await run(box, "PYTHONPATH=site python3 -c 'import tiny; print(tiny.WORD)'")
    assert said == "a tiny module\n"


async def test_npm_installs(box: Sandbox) -> None:
    needs("npm")
    npm = "npm install --silent --no-audit --no-fund --no-update-notifier"
    await run(box, f"{npm} --registry https://{NPM}/ tiny")
    assert await run(box, "node -p 'require(\"tiny\")'") == "a tiny package\n"


async def test_curl_and_node_trust_the_door(box: Sandbox) -> None:
    needs("node")
    assert "[redacted]" in await run(box, f"curl -sS https://{ECHO}/")
    fetch = f"fetch('https://{ECHO}/').then(r => console.log(r.status))"
    assert await run(box, f'node -e "{fetch}"') == "200\n"


async def listening(box: Sandbox) -> list[int]:
    """Have a program hold an answer in its memory; all processes of the sandbox, from here."""
    listener = await box.start_process(["python3", "-c", LISTENER, ECHO], stdin=True)
    await listener.wait_for_log("heard")
    pids = list(processes_of(f"-c\0{LISTENER}"))
    assert len(pids) >= 2
    return pids


async def test_nothing_in_the_sandbox_shows_the_token(
    box: Sandbox, token: str, tmp_path: Path
) -> None:
    pids = await listening(box)
    shown = await run(
        box,
        f"env; cat /proc/*/environ /proc/*/cmdline; curl -sSi https://{ECHO}/; "
        f"curl -sSi -X TRACE https://{ECHO}/; getent hosts {ECHO}; "
        "grep -rh tok_ /etc/ssl /root /tmp /workspace; true",
    )
    assert shown.lower().count("x-seen") == 2
    assert "[redacted]" in shown
    assert token not in shown
    looked = {pid: memory_shows(pid, token.encode()) for pid in pids}
    assert not any(looked.values()), looked
    assert os.geteuid() != 0 or None not in looked.values()
    assert not any(token in _text(f"/proc/{pid}/environ") for pid in pids)
    assert not files_with(tmp_path / "home", token.encode())
    events = await (await box.network.audit_log()).read()
    assert len(events) >= 3
    assert token not in str(events)


async def test_the_search_finds_the_token_without_scrubbing(
    box: Sandbox, registries: tuple[Registries, str], token: str
) -> None:
    await box.network.configure(replace(policy_for(registries[1]), scrub=False))
    found = [memory_shows(pid, token.encode()) for pid in await listening(box)]
    assert True in found or None in found


def processes_of(marker: str) -> Iterator[int]:
    """All processes that live with the one whose command line has `marker`, as seen from here."""
    found = [pid for pid in _pids() if marker in _text(f"/proc/{pid}/cmdline")]
    spaces = {_space(pid) for pid in found} - {_space(os.getpid()), ""}
    return (pid for pid in _pids() if _space(pid) in spaces)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def _space(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def memory_shows(pid: int, secret: bytes) -> bool | None:
    """Whether a process has some bytes in its memory; None where that may not be read."""
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
    """The files below a folder that hold some bytes."""
    found = []
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if file.is_file() and not file.is_symlink() and secret in file.read_bytes():
                found.append(file)
    return found
