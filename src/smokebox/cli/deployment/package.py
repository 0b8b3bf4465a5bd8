"""Package of a project: its name and version, and a wheel with a command that serves it."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shlex
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox import __version__
from smokebox.cli.templates import render
from smokebox.errors import InvalidOption
from smokebox.project import read_toml

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


_FILE = "pyproject.toml"
_TAKEN = frozenset(("pip", "python", "smokebox"))
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)*(?:(?:a|b|rc)[0-9]+)?(?:\.post[0-9]+)?(?:\.dev[0-9]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectFacts:
    """Name, version and dependencies of a project."""

    folder: Path
    name: str
    version: str
    needs: tuple[str, ...]

    @property
    def package(self) -> str:
        """Return the normalized name, as in names of wheels."""
        return re.sub(r"[-_.]+", "_", self.name).lower()

    @property
    def module(self) -> str:
        """Return the module to import; the prefix keeps `email` or `test` from hiding a module."""
        return f"smokebox_app_{self.package}"

    @property
    def wheel(self) -> str:
        """Return the file name of the wheel."""
        return f"{self.package}-{self.version}-py3-none-any.whl"

    def render(self, template: str) -> dict[str, str]:
        """Return the files of a template, filled with these facts."""
        return render(
            template,
            name=self.name,
            # Kubernetes takes names of DNS only.
            dns_name=self.package.replace("_", "-"),
            version=self.version,
            wheel=self.wheel,
            needs=" ".join(shlex.quote(one) for one in self.needs),
        )


def read_facts(folder: Path) -> ProjectFacts:
    """Read `[project]` of pyproject.toml; the name is by default that of the folder.

    Raises:
        InvalidOption: The file is not TOML, or the name or version is invalid.
    """
    file = folder / _FILE
    document = read_toml(file) if file.is_file() else {}
    project = document.get("project", {})
    name, version = project.get("name", folder.name), project.get("version", "0.1.0")
    needs = project.get("dependencies", [f"smokebox[models]>={__version__}"])
    for option, value, wanted in (("name", name, _NAME), ("version", version, _VERSION)):
        if not isinstance(value, str) or not wanted.fullmatch(value):
            raise InvalidOption(
                f"{file}: {value!r:.80} is not a valid {option}.",
                hint='Set name = "my-app" and version = "0.1.0" under [project].',
                option=option,
                value=value,
            )
    if name.lower() in _TAKEN:
        raise InvalidOption(
            f"a project cannot be called {name!r}, the name of another program.",
            hint=f"Set another name under [project] in {file}.",
            option="name",
            value=name,
        )
    return ProjectFacts(folder=folder, name=name.lower(), version=version, needs=tuple(needs))


# Folders that are not part of the package: tests, state, and output of tools.
_EXCLUDED_FOLDERS = frozenset(
    ("__pycache__", "build", "deploy", "dist", "node_modules", "tests", "venv")
)
_EXCLUDED_FILES = frozenset(("Dockerfile", "compose.yaml", "render.yaml"))
# The earliest time of a zip: the same files always give the same wheel.
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)

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


def build_wheel(facts: ProjectFacts, folder: Path) -> Path:
    """Write the wheel to a folder, replacing one of the same version, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / facts.wheel
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        record = []
        for name, data in _contents(facts):
            entry = zipfile.ZipInfo(name, _TIMESTAMP)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}")
        name = f"{_dist_info(facts)}/RECORD"
        archive.writestr(zipfile.ZipInfo(name, _TIMESTAMP), "\n".join([*record, f"{name},,", ""]))
    os.replace(partial, path)
    return path


def _contents(facts: ProjectFacts) -> Iterator[tuple[str, bytes]]:
    for name in project_files(facts.folder):
        yield f"{facts.module}/{name}", (facts.folder / name).read_bytes()
    words = {"name": facts.name, "module": facts.module, "version": facts.version}
    needs = "".join(f"Requires-Dist: {one}\n" for one in facts.needs)
    yield f"{facts.module}/__main__.py", facts.render("wheel")["__main__.py"].encode()
    yield f"{_dist_info(facts)}/METADATA", (_METADATA.format(**words) + needs).encode()
    yield f"{_dist_info(facts)}/WHEEL", _WHEEL.encode()
    yield f"{_dist_info(facts)}/entry_points.txt", _ENTRY.format(**words).encode()


def project_files(folder: Path) -> list[str]:
    """Return the files of a project, without secrets and state."""
    paths: list[str] = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(
            one for one in folders if not one.startswith(".") and one not in _EXCLUDED_FOLDERS
        )
        paths += [
            os.path.relpath(os.path.join(root, file), folder)
            for file in sorted(files)
            if not file.startswith(".") and file not in _EXCLUDED_FILES and file != "__main__.py"
        ]
    return paths


def _dist_info(facts: ProjectFacts) -> str:
    return f"{facts.package}-{facts.version}.dist-info"
