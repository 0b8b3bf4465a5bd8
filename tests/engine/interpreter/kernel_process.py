"""Kernels without a sandbox, run with the libraries of this virtualenv."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from smokebox.engine.interpreter import kernel
from smokebox.engine.interpreter.frames import (
    KernelEnd,
    KernelError,
    KernelFrame,
    KernelOutput,
    KernelReady,
    KernelResult,
    parse,
)

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


class CodeOutput:
    """All frames of one code execution, sorted by kind."""

    def __init__(self, frames: list[KernelFrame]) -> None:
        self.frames = frames
        self.results = [one.to_result() for one in frames if isinstance(one, KernelResult)]
        self.stdout = self._output("stdout")
        self.stderr = self._output("stderr")
        self.error = next((one for one in frames if isinstance(one, KernelError)), None)

    def _output(self, stream: str) -> str:
        pieces = [
            one for one in self.frames if isinstance(one, KernelOutput) and one.stream == stream
        ]
        return "".join(one.data for one in pieces)


class KernelProcess:
    """A running kernel, driven over the same protocol as in the engine."""

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
        try:
            first = self._frame()
            assert isinstance(first, KernelReady), f"the kernel's first frame is {first}"
        except BaseException:
            self.close()
            raise

    def run(self, code: str, **env: str) -> CodeOutput:
        """Run code and return its output."""
        self.start(code, **env)
        return self.finish()

    def start(self, code: str, **env: str) -> None:
        """Send code to the kernel."""
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

    def finish(self) -> CodeOutput:
        """Wait until the started code ends, and return its output."""
        frames = [self._frame()]
        while not isinstance(frames[-1], KernelEnd):
            frames.append(self._frame())
        assert {frame.id for frame in frames} == {str(self._count)}
        return CodeOutput(frames)

    def interrupt(self) -> None:
        """Send SIGINT to the kernel's process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def _frame(self) -> KernelFrame:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the kernel ended with exit code {self.process.wait(10)}"
        return parse(line.rstrip(b"\n"))

    def close(self) -> None:
        """Kill the kernel and close its pipes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def python_kernel(
    cwd: Path, *, before: str = "", env: dict[str, str] | None = None
) -> KernelProcess:
    """Start a Python kernel that executes `before` ahead of its main module."""
    boot = BOOT.format(path=str(SOURCES / "__init__.py"), folder=str(SOURCES), before=before)
    return KernelProcess([sys.executable, "-c", boot], cwd, env)


def script_kernel(cwd: Path, *program: str, language: str = "javascript") -> KernelProcess:
    """Start a JavaScript or TypeScript kernel with a program such as node or deno."""
    move = 'exec 3<&0 4>&1 1>&2 </dev/null; exec "$@"'
    kernel = str(SOURCES / "kernel.mjs")
    return KernelProcess(["sh", "-c", move, "sh", *program, kernel, language], cwd)
