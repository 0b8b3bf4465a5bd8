"""The kernel of Python contexts by itself, with the libraries of this virtualenv."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from smokebox.engine.interpreter import kernel
from smokebox.engine.interpreter.frames import Failed, Frame, Output, Result, parse, result_of

SOURCES = Path(kernel.__file__).parent
BOOT = (
    "import importlib.util as u, sys\n"
    "spec = u.spec_from_file_location('smokebox_kernel', {path!r},"
    " submodule_search_locations=[{folder!r}])\n"
    "sys.modules['smokebox_kernel'] = module = u.module_from_spec(spec)\n"
    "spec.loader.exec_module(module)\n"
    "{before}\n"
    "from smokebox_kernel.main import main; main()"
)


class Told:
    """What one piece of code gave."""

    def __init__(self, frames: list[Frame]) -> None:
        self.frames = frames
        self.results = [result_of(one) for one in frames if isinstance(one, Result)]
        self.stdout = self._output("stdout")
        self.stderr = self._output("stderr")
        self.error = next((one for one in frames if isinstance(one, Failed)), None)

    def _output(self, stream: str) -> str:
        pieces = [one for one in self.frames if isinstance(one, Output) and one.stream == stream]
        return "".join(one.data for one in pieces)


class KernelProcess:
    """A kernel that runs code, as the engine talks to it."""

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=cwd,
            env={"PATH": os.environ["PATH"], "HOME": str(cwd), **(env or {})},
            start_new_session=True,
        )
        self._count = 0
        assert self._frame().__class__.__name__ == "Ready"

    def run(self, code: str, **env: str) -> Told:
        """Run code, and give all that comes of it."""
        self.ask(code, **env)
        return self.hear()

    def ask(self, code: str, **env: str) -> None:
        """Have code run."""
        self._count += 1
        request: dict[str, Any] = {
            "id": str(self._count),
            "code": code,
            "env": env,
            "timeout": None,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> Told:
        """All that comes of the code that was asked for."""
        frames = [self._frame()]
        while frames[-1].__class__.__name__ != "End":
            frames.append(self._frame())
        assert {frame.id for frame in frames} == {str(self._count)}
        return Told(frames)

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def _frame(self) -> Frame:
        assert self.process.stdout is not None
        return parse(self.process.stdout.readline().rstrip(b"\n"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()


def python_kernel(
    cwd: Path, *, before: str = "", env: dict[str, str] | None = None
) -> KernelProcess:
    """A kernel of Python, which runs `before` first."""
    boot = BOOT.format(path=str(SOURCES / "__init__.py"), folder=str(SOURCES), before=before)
    return KernelProcess([sys.executable, "-c", boot], cwd, env)


def script_kernel(cwd: Path, *program: str, language: str = "javascript") -> KernelProcess:
    """A kernel of JavaScript or TypeScript, by that program."""
    move = 'exec 3<&0 4>&1 1>&2 </dev/null; exec "$@"'
    kernel = str(SOURCES / "kernel.mjs")
    return KernelProcess(["sh", "-c", move, "sh", *program, kernel, language], cwd)
