"""Kernels by language: the programs of the image that run them, and their installation."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox.engine.images.store import DENO
from smokebox.engine.jail.namespace_setup import IO
from smokebox.errors import Unsupported
from smokebox.foundation.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.run import Run
    from smokebox.types import CodeLanguage

PACKAGE = "smokebox_kernel"
NOT_FOUND = 127
# The kernel must not import modules from the user's working directory.
_PYTHON = (
    "import sys; sys.path[:] = [{directory!r}, *filter(None, sys.path)]; "
    "from {package}.main import main; main()"
)
# The kernel uses descriptors 3 and 4, and leaves 1 and 2 to the code. The image's Deno comes first,
# then the engine's, which does not load with another C library, then Node.
_SCRIPT = r"""
exec 3<&0 4>&1 1>&2 </dev/null
for deno in "$(command -v deno)" "$1"; do
    [ -x "$deno" ] && { shopt -s execfail || "$deno" --version; } >/dev/null 2>&1 &&
        exec "$deno" run -A -q --no-prompt --no-lock "$0" "$2"
done
command -v node >/dev/null && exec node --no-warnings "$0" "$2"
exit 127
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """A kernel: its language, the programs that can run it, and a hint for images without them."""

    language: CodeLanguage
    programs: tuple[str, ...]
    hint: str

    def commands(self, run: Run, directory: str) -> Iterator[list[str]]:
        """Yield commands to try in order, with the sources in a directory of the sandbox."""
        if self.language == "python":
            for program in self.programs:
                yield [program, "-c", _PYTHON.format(directory=directory, package=PACKAGE)]
        else:
            kernel = f"{directory}/{PACKAGE}/kernel.mjs"
            yield [run.shell, "-c", _SCRIPT, kernel, DENO, self.language]

    def missing(self, sandbox: str) -> Unsupported:
        """Return the error for an image that has none of the programs."""
        programs = " or ".join(self.programs)
        return self._unsupported(
            f"sandbox {sandbox} has no {programs} to run {self.language} code."
        )

    def failed(self, output: str) -> Unsupported:
        """Return the error for a program that does not run the kernel."""
        return self._unsupported(
            f"the {self.language} kernel did not start in the sandbox: {output or 'no output'}"
        )

    def _unsupported(self, message: str) -> Unsupported:
        return Unsupported(message, hint=self.hint, operation="run_code", language=self.language)


_DENO = "Install 'smokebox[javascript]' where the server runs, or use an image with"
_KERNELS: dict[CodeLanguage, KernelSpec] = {
    "python": KernelSpec(
        language="python",
        programs=("python3", "python"),
        hint="Use an image with Python 3.8 or later, or install it on the PATH.",
    ),
    "javascript": KernelSpec(
        language="javascript",
        programs=("deno", "node"),
        hint=f"{_DENO} Deno 2.6 or Node 20, or later.",
    ),
    "typescript": KernelSpec(
        language="typescript",
        programs=("deno", "node"),
        hint=f"{_DENO} Deno 2.6 or Node 22.13, or later.",
    ),
}


def kernel_for(language: CodeLanguage) -> KernelSpec:
    """Return the kernel of a language."""
    return _KERNELS[language]


def install(run: Run) -> str:
    """Install the kernels in the sandbox, read-only, and return their directory inside."""
    name = f"code-{_digest()}"
    target = f"{run.directory}/run/io/{name}"
    if not os.path.isdir(target):
        temporary = f"{run.directory}/run/io/.{new_id()}"
        try:
            _copy(f"{temporary}/{PACKAGE}")
            os.chmod(temporary, 0o755)
            os.rename(temporary, target)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            # A concurrent call may have installed them.
            if not os.path.isdir(target):
                raise
    return f"{IO}/{name}"


def _copy(target: str) -> None:
    os.makedirs(target)
    os.chmod(target, 0o755)
    for name, data in _sources().items():
        path = Path(target, name)
        path.write_bytes(data)
        path.chmod(0o644)


@functools.cache
def _sources() -> dict[str, bytes]:
    folder = Path(__file__).parent / "kernel"
    files = sorted(path for path in folder.iterdir() if path.suffix in (".py", ".mjs"))
    return {path.name: path.read_bytes() for path in files}


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256()
    for name, data in _sources().items():
        digest.update(name.encode() + b"\0" + data)
    return digest.hexdigest()[:16]
