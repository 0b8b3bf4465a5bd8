"""Trial of a project's wheel: install it into a new environment, start it, send requests."""

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

from smokebox.app.definitions import ServedAgent
from smokebox.app.project import load_project
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.cli.deployment.package import ProjectFacts

_KEY = "trial"
_SECONDS = 60.0
# Makes the packages of this environment importable in the new one, editable ones included.
_SITE_HOOK = "import site; list(map(site.addsitedir, {folders!r}))\n"


def try_wheel(facts: ProjectFacts, wheel: Path, report: Callable[[str], None]) -> None:
    """Install and serve a wheel in production mode, and prompt its first agent.

    Dependencies are those of this environment. The agent's model gets one request.

    Raises:
        SmokeboxError: The wheel does not install, serve, answer or stop.
    """
    with tempfile.TemporaryDirectory() as folder:
        python = _install(Path(folder), wheel)
        report(f"{wheel.name} installs into a new environment")
        command = [str(python.with_name(facts.name)), "--port", "0"]
        env = {**os.environ, "SMOKEBOX_APP_KEYS": _KEY, "SMOKEBOX_APP_STATE": f"{folder}/state"}
        env.pop("PYTHONPATH", None)
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            url = _url(process)
            report(f"`{facts.name}` serves; /health: {_request(url, '/health')['status']}")
            _prompt_agent(facts, url, report)
        finally:
            process.terminate()
            process.communicate()
    if process.returncode != 0:
        raise SmokeboxError(f"`{facts.name}` exited with {process.returncode} after SIGTERM.")
    report("it stops cleanly")


def _install(folder: Path, wheel: Path) -> Path:
    # Use this environment's pip if it has one: installing another takes seconds.
    own_pip = importlib.util.find_spec("pip") is not None
    venv.create(folder / "venv", with_pip=not own_pip)
    python = folder / "venv" / "bin" / "python"
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    (site / "outer_environment.pth").write_text(_SITE_HOOK.format(folders=folders))
    pip = [str(python), "-m", "pip"]
    if own_pip:
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
    install = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel)]
    done = subprocess.run([*pip, *install], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SmokeboxError(f"{wheel.name} does not install: {done.stderr.strip()[-500:]}")
    return python


def _url(process: subprocess.Popen[bytes]) -> str:
    output = b""
    assert process.stdout is not None
    for line in process.stdout:
        output += line
        if found := re.search(rb" on (http://\S+)", line):
            return found[1].decode()
    raise SmokeboxError(f"it does not serve: {output.decode(errors='replace').strip()[-1000:]}")


def _prompt_agent(facts: ProjectFacts, url: str, report: Callable[[str], None]) -> None:
    project = load_project(facts.folder)
    for name, agent in project.agents.items():
        if isinstance(agent, ServedAgent) and agent.trigger.signature is None:
            done = _request(url, f"/agents/{name}/trial?wait=result", {"message": "Hello"})
            if done.get("outcome") != "completed":
                error = done.get("failure") or done.get("error") or {}
                raise SmokeboxError(f"{name} does not answer: {error.get('message', done)}")
            report(
                f"{name} answers: {json.dumps(done['result']['text'], ensure_ascii=False)[:100]}"
            )
            return
    report("there is no agent to prompt")


def _request(url: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"authorization": f"Bearer {_KEY}"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return json.load(error)
