"""Where the files of a skill lie: in code, in a folder of this host or a package, in a sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from smokebox.agents.skills.frontmatter import parse_document
from smokebox.errors import NotFound, SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from importlib.resources.abc import Traversable

    from smokebox.sandbox.api import SandboxApi

MANIFEST = "SKILL.md"
_LEFT_BY_PYTHON = ("__pycache__", "__init__.py")


class SkillSource(Protocol):
    """Reads a skill when it is wanted."""

    @property
    def directory(self) -> str | None:
        """Where the files are for the model's own tools, or None where these cannot reach them."""
        ...

    async def instructions(self) -> str:
        """What to do."""
        ...

    async def files(self) -> list[str]:
        """The names of the other files, sorted."""
        ...

    async def read(self, file: str) -> bytes:
        """One of them."""
        ...


class InCode:
    """Given as values."""

    directory = None

    def __init__(self, instructions: str, resources: Mapping[str, str | bytes]) -> None:
        self._instructions = instructions
        self._resources = dict(resources)

    async def instructions(self) -> str:
        return self._instructions

    async def files(self) -> list[str]:
        return sorted(self._resources)

    async def read(self, file: str) -> bytes:
        data = self._resources[file]
        return data.encode() if isinstance(data, str) else data


class InFolder:
    """In a folder of this host, or of a package, perhaps in a zip file."""

    directory = None

    def __init__(self, folder: Traversable) -> None:
        self._folder = folder

    async def instructions(self) -> str:
        return parse_document(self._folder.joinpath(MANIFEST).read_text("utf-8")).body

    async def files(self) -> list[str]:
        return sorted(name for name, _ in self._walk(self._folder, ""))

    async def read(self, file: str) -> bytes:
        return dict(self._walk(self._folder, ""))[file].read_bytes()

    def _walk(self, folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
        for item in folder.iterdir():
            # A dotfile may hold a secret, and a link may lead to one.
            if item.name.startswith(".") or item.name in _LEFT_BY_PYTHON or self._leads_out(item):
                continue
            if item.is_dir():
                yield from self._walk(item, f"{prefix}{item.name}/")
            elif prefix + item.name != MANIFEST:
                yield prefix + item.name, item

    def _leads_out(self, item: Traversable) -> bool:
        if not isinstance(item, Path) or not isinstance(self._folder, Path):
            return False
        return not item.resolve().is_relative_to(self._folder.resolve())


class InSandbox:
    """In the workspace, where the model's own tools reach it too."""

    def __init__(self, sandbox: SandboxApi, directory: str) -> None:
        self._sandbox = sandbox
        self.directory = directory

    async def instructions(self) -> str:
        path = f"{self.directory}/{MANIFEST}"
        try:
            return parse_document(await self._sandbox.read_file(path)).body
        except ValueError as error:
            raise SmokeboxError(
                f"{path} cannot be read: {error}.", hint="Mend the file."
            ) from error
        except FileNotFoundError as error:
            raise NotFound(f"{path} is not there any more.", kind="skill", name=path) from error

    async def files(self) -> list[str]:
        found = await self._sandbox.glob("**/*", cwd=self.directory, files_only=True)
        names = (path.removeprefix(f"{self.directory}/") for path in found)
        return sorted(name for name in names if name != MANIFEST)

    async def read(self, file: str) -> bytes:
        return await self._sandbox.read_bytes(f"{self.directory}/{file}")
