"""A project as a wheel, with a command that serves it."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from typing import TYPE_CHECKING

from smokebox import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from smokebox.cli.deployment.facts import Facts

# What of a folder is not the project: secrets, state, tests, and what tools leave.
_LEFT_OUT = frozenset(("__pycache__", "build", "deploy", "dist", "node_modules", "tests", "venv"))
_FILES = frozenset(("Dockerfile", "compose.yaml", "render.yaml"))
# The first moment that a zip can tell: the same files are the same wheel.
_MOMENT = (1980, 1, 1, 0, 0, 0)

_MAIN = '''\
"""Serves {name}: `{name} --host 0.0.0.0 --port 8600` is `smokebox app` of this folder."""

import os
import sys

from smokebox.cli.app import run


def main():
    os.environ.setdefault("SMOKEBOX_APP_STATE", os.path.abspath("{name}-state"))
    return run(["app", os.path.dirname(os.path.abspath(__file__)), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
'''

_METADATA = """\
Metadata-Version: 2.1
Name: {name}
Version: {version}
Requires-Python: >=3.11
"""

_WHEEL = f"""\
Wheel-Version: 1.0
Generator: smokebox {__version__}
Root-Is-Purelib: true
Tag: py3-none-any
"""

_ENTRY = """\
[console_scripts]
{name} = {module}.__main__:main
"""


def build_wheel(facts: Facts, folder: Path) -> Path:
    """Write it to a folder, in place of one of the same version; gives its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / facts.wheel
    half = path.with_suffix(".half")
    with zipfile.ZipFile(half, "w", zipfile.ZIP_DEFLATED) as archive:
        record = []
        for name, data in _contents(facts):
            entry = zipfile.ZipInfo(name, _MOMENT)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}")
        name = f"{_info(facts)}/RECORD"
        archive.writestr(zipfile.ZipInfo(name, _MOMENT), "\n".join([*record, f"{name},,", ""]))
    os.replace(half, path)
    return path


def _contents(facts: Facts) -> Iterator[tuple[str, bytes]]:
    for name in files_of(facts.folder):
        yield f"{facts.module}/{name}", (facts.folder / name).read_bytes()
    words = {"name": facts.name, "module": facts.module, "version": facts.version}
    needs = "".join(f"Requires-Dist: {one}\n" for one in facts.needs)
    yield f"{facts.module}/__main__.py", _MAIN.format(**words).encode()
    yield f"{_info(facts)}/METADATA", (_METADATA.format(**words) + needs).encode()
    yield f"{_info(facts)}/WHEEL", _WHEEL.encode()
    yield f"{_info(facts)}/entry_points.txt", _ENTRY.format(**words).encode()


def files_of(folder: Path) -> list[str]:
    """The files that a project is made of, without secrets and state."""
    found: list[str] = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(
            one for one in folders if not one.startswith(".") and one not in _LEFT_OUT
        )
        found += [
            os.path.relpath(os.path.join(root, file), folder)
            for file in sorted(files)
            if not file.startswith(".") and file not in _FILES and file != "__main__.py"
        ]
    return found


def _info(facts: Facts) -> str:
    return f"{facts.package}-{facts.version}.dist-info"
