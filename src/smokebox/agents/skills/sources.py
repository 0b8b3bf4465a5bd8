"""Sources of skills: code, a folder of this host or a package, a sandbox; and SKILL.md files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from smokebox.errors import NotFound, SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from importlib.resources.abc import Traversable

    import yaml

    from smokebox.sandbox.api import SandboxApi


Value: TypeAlias = "str | list[Value] | dict[str, Value]"

_COLON = re.compile(r"([A-Za-z_][\w-]*): +([^\s\"'\[{|>&*!@`%#].*: .*)")


@dataclass(frozen=True, slots=True)
class Document:
    """A Markdown file: its YAML front matter, and the text after it."""

    front_matter: dict[str, Value] = field(default_factory=dict)
    body: str = ""


def parse_document(text: str) -> Document:
    """Split a file into front matter and text. Scalars of the front matter stay strings.

    Raises:
        ValueError: There is no front matter, or it is not valid YAML; names the line.
    """
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    if lines[0].rstrip() != "---":
        raise ValueError("line 1: the file does not start with front matter between `---` lines")
    ends = (n for n, line in enumerate(lines) if n and line.rstrip() in ("---", "..."))
    end = next(ends, None)
    if end is None:
        raise ValueError("line 1: the front matter that starts with `---` has no end")
    # The first line is left empty, so that YAML counts lines as the file does.
    front_matter = _parse_yaml("\n".join(["", *(_quote(line) for line in lines[1:end])]))
    return Document(front_matter, "\n".join(lines[end + 1 :]).strip("\n"))


def _quote(line: str) -> str:
    """Quote `key: a value: with a colon`, which is not YAML but common in skills."""
    match = _COLON.fullmatch(line)
    return line if match is None else f"{match[1]}: {json.dumps(match[2].strip())}"


def _parse_yaml(text: str) -> dict[str, Value]:
    # Imported here: it takes 20 ms, and most programs have no skills.
    import yaml

    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if getattr(event, "anchor", None) or getattr(event, "tag", None):
                kind = "an anchor or alias" if getattr(event, "anchor", None) else "a tag"
                raise _yaml_error(event.start_mark, f"{kind} is not allowed; quote the value")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        reason = error.problem or error.context or "it is not YAML"
        raise _yaml_error(error.problem_mark, f"{reason}; quote values with `: `") from error
    except yaml.YAMLError as error:
        raise ValueError(f"line 1: the front matter is not YAML: {error}") from error
    if node is None:
        return {}
    value = _plain(node)
    if not isinstance(value, dict):
        raise _yaml_error(node.start_mark, "the front matter is not `key: value`")
    return value


def _plain(node: yaml.Node) -> Value:
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    if not isinstance(node, yaml.MappingNode):
        return str(node.value)
    mapping: dict[str, Value] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _yaml_error(key.start_mark, "a key is not a string")
        if key.value in mapping:
            raise _yaml_error(key.start_mark, f"the key {key.value!r} is there twice")
        mapping[key.value] = _plain(value)
    return mapping


def _yaml_error(mark: Any, problem: str) -> ValueError:
    return ValueError(f"line {1 if mark is None else mark.line + 1}: {problem}")


MANIFEST = "SKILL.md"
_PYTHON_FILES = ("__pycache__", "__init__.py")


class SkillSource(Protocol):
    """Reads the instructions and files of a skill."""

    @property
    def directory(self) -> str | None:
        """Directory of the files in the workspace, or None if they are elsewhere."""
        ...

    async def instructions(self) -> str:
        """Return the instructions."""
        ...

    async def files(self) -> list[str]:
        """Return the names of the other files, sorted."""
        ...

    async def read(self, file: str) -> bytes:
        """Return one of the other files."""
        ...


class CodeSource:
    """Source of a skill that is defined in code."""

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


class FolderSource:
    """Source of a skill in a folder of this host or of a package, which may be a zip file."""

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
            # A dotfile may contain secrets, and a symlink may point to one.
            if item.name.startswith(".") or item.name in _PYTHON_FILES or self._is_outside(item):
                continue
            if item.is_dir():
                yield from self._walk(item, f"{prefix}{item.name}/")
            elif prefix + item.name != MANIFEST:
                yield prefix + item.name, item

    def _is_outside(self, item: Traversable) -> bool:
        if not isinstance(item, Path) or not isinstance(self._folder, Path):
            return False
        return not item.resolve().is_relative_to(self._folder.resolve())


class SandboxSource:
    """Source of a skill in the workspace."""

    def __init__(self, sandbox: SandboxApi, directory: str) -> None:
        self._sandbox = sandbox
        self.directory = directory

    async def instructions(self) -> str:
        path = f"{self.directory}/{MANIFEST}"
        try:
            return parse_document(await self._sandbox.read_file(path)).body
        except ValueError as error:
            raise SmokeboxError(f"{path} cannot be read: {error}.", hint="Fix the file.") from error
        except FileNotFoundError as error:
            raise NotFound(f"{path} was removed.", kind="skill", name=path) from error

    async def files(self) -> list[str]:
        found = await self._sandbox.glob("**/*", cwd=self.directory, files_only=True)
        names = (path.removeprefix(f"{self.directory}/") for path in found)
        return sorted(name for name in names if name != MANIFEST)

    async def read(self, file: str) -> bytes:
        return await self._sandbox.read_bytes(f"{self.directory}/{file}")
