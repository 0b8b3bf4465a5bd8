"""A wheel of a project on trial: installed into a fresh environment, started, and asked."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.request
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smokebox.app.project import load_project
from smokebox.app.served import ServedAgent
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.cli.deployment.facts import Facts

_KEY = "trial"
_SECONDS = 60.0
# What a new environment has of this one, with what is installed here in place.
_BORROWED = "import site; list(map(site.addsitedir, {folders!r}))\n"


def try_wheel(facts: Facts, wheel: Path, tell: Callable[[str], None]) -> None:
    """See that it installs, serves and answers, in production mode. Raises `SmokeboxError`.

    What it needs is taken from this environment; the model of its first agent is asked once.
    """
    with tempfile.TemporaryDirectory() as folder:
        python = _install(Path(folder), wheel)
        tell(f"{wheel.name} is installed in an environment of its own")
        command = [str(python.with_name(facts.name)), "--port", "0"]
        env = {**os.environ, "SMOKEBOX_APP_KEYS": _KEY, "SMOKEBOX_APP_STATE": f"{folder}/state"}
        env.pop("PYTHONPATH", None)
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            url = _url(process)
            tell(f"`{facts.name}` serves, and says that it is {_ask(url, '/health')['status']}")
            _ask_agent(facts, url, tell)
        finally:
            process.terminate()
            process.communicate()
    if process.returncode != 0:
        raise SmokeboxError(f"`{facts.name}` ended with {process.returncode} when it was stopped.")
    tell("it ends in good order")


def _install(folder: Path, wheel: Path) -> Path:
    # The pip of this environment can install into another; making one there takes seconds.
    ours = importlib.util.find_spec("pip") is not None
    venv.create(folder / "venv", with_pip=not ours)
    python = folder / "venv" / "bin" / "python"
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    (site / "borrowed.pth").write_text(_BORROWED.format(folders=folders))
    pip = [str(python), "-m", "pip"]
    if ours:
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
    install = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel)]
    done = subprocess.run([*pip, *install], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SmokeboxError(f"{wheel.name} cannot be installed: {done.stderr.strip()[-500:]}")
    return python


def _url(process: subprocess.Popen[bytes]) -> str:
    said = b""
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        if found := re.search(rb" on (http://\S+)", line):
            return found[1].decode()
    raise SmokeboxError(f"it does not serve: {said.decode(errors='replace').strip()[-1000:]}")


def _ask_agent(facts: Facts, url: str, tell: Callable[[str], None]) -> None:
    project = load_project(facts.folder)
    for name, agent in project.agents.items():
        if isinstance(agent, ServedAgent) and agent.trigger.signature is None:
            done = _ask(url, f"/agents/{name}/trial?wait=result", {"message": "Hello"})
            if done.get("outcome") != "completed":
                error = done.get("error") or {}
                raise SmokeboxError(f"{name} does not answer: {error.get('message', done)}")
            tell(f"{name} answers: {json.dumps(done['result']['text'], ensure_ascii=False)[:100]}")
            return
    tell("there is no agent that could be asked")


def _ask(url: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"authorization": f"Bearer {_KEY}"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return json.load(error)
