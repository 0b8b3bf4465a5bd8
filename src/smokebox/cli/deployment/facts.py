"""What is known of a project that is to be packed."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox import __version__
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from pathlib import Path

_FILE = "pyproject.toml"
_TAKEN = frozenset(("pip", "python", "smokebox"))
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)*(?:(?:a|b|rc)[0-9]+)?(?:\.post[0-9]+)?(?:\.dev[0-9]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Its name as packages and commands have it, its version, and what it needs."""

    folder: Path
    name: str
    version: str
    needs: tuple[str, ...]

    @property
    def package(self) -> str:
        """The name as files of wheels have it."""
        return re.sub(r"[-_.]+", "_", self.name).lower()

    @property
    def module(self) -> str:
        """What is imported: a project may have the name of a module, as `email` and `test` are."""
        return f"smokebox_app_{self.package}"

    @property
    def wheel(self) -> str:
        """The name of the wheel's file."""
        return f"{self.package}-{self.version}-py3-none-any.whl"


def read_facts(folder: Path) -> Facts:
    """What `[project]` of pyproject.toml says, or the folder's name. Raises `InvalidOption`."""
    file = folder / _FILE
    try:
        found = tomllib.loads(file.read_text()) if file.is_file() else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidOption(
            f"{file} is not TOML: {error}.", hint="Mend that line.", option=str(file)
        ) from None
    project = found.get("project", {})
    name, version = project.get("name", folder.name), project.get("version", "0.1.0")
    needs = project.get("dependencies", [f"smokebox[models]>={__version__}"])
    for option, value, wanted in (("name", name, _NAME), ("version", version, _VERSION)):
        if not isinstance(value, str) or not wanted.fullmatch(value):
            raise InvalidOption(
                f"{file}: {option} cannot be {value!r:.80}.",
                hint='Write [project], name = "my-app" and version = "0.1.0" there.',
                option=option,
                value=value,
            )
    if name.lower() in _TAKEN:
        raise InvalidOption(
            f"a project cannot be called {name!r}: that is another program.",
            hint=f"Write another name under [project] in {file}.",
            option="name",
            value=name,
        )
    return Facts(folder=folder, name=name.lower(), version=version, needs=tuple(needs))
