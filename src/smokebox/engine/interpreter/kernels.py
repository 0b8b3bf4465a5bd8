"""The kernels by language: which program of the image runs what, and what to do without it."""

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
# The directory where it starts is the user's, and shall not give the kernel its modules.
_PYTHON = (
    "import sys; sys.path[:] = [{place!r}, *filter(None, sys.path)]; "
    "from {package}.main import main; main()"
)
# To the kernel through 3 and 4: to the code 1 and 2 are its own. The image's Deno goes first,
# then the one that came along, which another C library cannot load, then Node.
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
    """How the kernel of a language is started, by one of these programs, and what mends it."""

    language: CodeLanguage
    programs: tuple[str, ...]
    fix: str

    def commands(self, run: Run, place: str) -> Iterator[list[str]]:
        """What to start, with the sources in a directory of the sandbox: the first that is."""
        if self.language == "python":
            for program in self.programs:
                yield [program, "-c", _PYTHON.format(place=place, package=PACKAGE)]
        else:
            kernel = f"{place}/{PACKAGE}/kernel.mjs"
            yield [run.shell, "-c", _SCRIPT, kernel, DENO, self.language]

    def missing(self, sandbox: str) -> Unsupported:
        """The error for an image without any of the programs."""
        return Unsupported(
            f"sandbox {sandbox} has no {' and no '.join(self.programs)}, which runs "
            f"{self.language} code.",
            hint=self.fix,
            operation="run_code",
            language=self.language,
        )

    def unfit(self, said: str) -> Unsupported:
        """The error for a program that does not run the kernel."""
        return Unsupported(
            f"what runs {self.language} code in the sandbox does not: "
            f"{said or 'it ended without a word'}",
            hint=self.fix,
            operation="run_code",
            language=self.language,
        )


_DENO = "Install 'smokebox[javascript]' where the server runs, or use an image that has"
_KERNELS: dict[CodeLanguage, KernelSpec] = {
    "python": KernelSpec(
        language="python",
        programs=("python3", "python"),
        fix="Use an image with Python 3.8 or later, or install one where its PATH leads.",
    ),
    "javascript": KernelSpec(
        language="javascript",
        programs=("deno", "node"),
        fix=f"{_DENO} Deno from 2.6 on, or Node from 20 on.",
    ),
    "typescript": KernelSpec(
        language="typescript",
        programs=("deno", "node"),
        fix=f"{_DENO} Deno from 2.6 on, or Node from 22.13 on.",
    ),
}


def kernel_for(language: CodeLanguage) -> KernelSpec:
    """The kernel of a language."""
    return _KERNELS[language]


def install(run: Run) -> str:
    """Have the sources of the kernels be in the sandbox, read-only; where they are inside."""
    name = f"code-{_fingerprint()}"
    place = f"{run.directory}/run/io/{name}"
    if not os.path.isdir(place):
        making = f"{run.directory}/run/io/.{new_id()}"
        try:
            _copy(f"{making}/{PACKAGE}")
            os.chmod(making, 0o755)
            os.rename(making, place)
        except OSError:
            shutil.rmtree(making, ignore_errors=True)
            # Somebody else was quicker.
            if not os.path.isdir(place):
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
def _fingerprint() -> str:
    digest = hashlib.sha256()
    for name, data in _sources().items():
        digest.update(name.encode() + b"\0" + data)
    return digest.hexdigest()[:16]
