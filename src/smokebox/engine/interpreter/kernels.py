"""The kernels by language: which program of the image runs what, and what to do without it."""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox.engine.jail.cell import IO
from smokebox.errors import Unsupported

if TYPE_CHECKING:
    from smokebox.engine.run import Run
    from smokebox.types import CodeLanguage

PACKAGE = "smokebox_kernel"
# The directory where it starts is the user's, and shall not give the kernel its modules.
_BOOT = (
    "import sys; sys.path[:] = [{place!r}, *filter(None, sys.path)]; "
    "from {package}.main import main; main()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """How the kernel of a language is started: the first of these programs that is there."""

    language: CodeLanguage
    programs: tuple[str, ...]
    fix: str

    def command(self, program: str, place: str) -> list[str]:
        """What to start, with the sources in a directory of the sandbox."""
        return [program, "-c", _BOOT.format(place=place, package=PACKAGE)]

    def missing(self, sandbox: str) -> Unsupported:
        """The error for an image without any of the programs."""
        return Unsupported(
            f"sandbox {sandbox} has no {' and no '.join(self.programs)}, which runs "
            f"{self.language} code.",
            hint=self.fix,
            operation="run_code",
            language=self.language,
        )

    def unfit(self, program: str, said: str) -> Unsupported:
        """The error for a program that does not run the kernel."""
        return Unsupported(
            f"the {program} of the sandbox does not run {self.language} code: "
            f"{said or 'it ended without a word'}",
            hint=self.fix,
            operation="run_code",
            language=self.language,
        )


_KERNELS: dict[CodeLanguage, Kernel] = {
    "python": Kernel(
        language="python",
        programs=("python3", "python"),
        fix="Use an image with Python 3.8 or later, or install one where its PATH leads.",
    ),
}


def kernel_for(language: CodeLanguage) -> Kernel:
    """The kernel of a language."""
    return _KERNELS[language]


def install(run: Run) -> str:
    """Have the sources of the kernels be in the sandbox, read-only; where they are inside."""
    name = f"code-{_fingerprint()}"
    place = f"{run.directory}/run/io/{name}"
    if not os.path.isdir(place):
        making = f"{run.directory}/run/io/.{secrets.token_hex(8)}"
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
    files = sorted(path for path in folder.iterdir() if path.suffix == ".py")
    return {path.name: path.read_bytes() for path in files}


@functools.cache
def _fingerprint() -> str:
    digest = hashlib.sha256()
    for name, data in _sources().items():
        digest.update(name.encode() + b"\0" + data)
    return digest.hexdigest()[:16]
