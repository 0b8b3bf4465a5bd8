"""Where secrets are: the environment of this process, and the `.env` of its project.

They stay in this process. Nothing here is ever written into a sandbox.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from smokebox.errors import InvalidOption

FILE = ".env"
PROJECT = "smokebox.toml"

_ENTRY = re.compile(
    r"""\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)[ \t]*=[ \t]*
    (?:'(?P<literal>[^']*)' | "(?P<quoted>(?:[^"\\]|\\.)*)" | (?P<plain>[^\n]*?))
    [ \t]*(?:(?<=\s)\#[^\n]*|(?<=['"])\#[^\n]*)?(?:\n|\Z)""",
    re.VERBOSE | re.DOTALL,
)
_NOTHING = re.compile(r"[ \t\r]*(?:#[^\n]*)?(?:\n|\Z)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


class Secrets:
    """Secrets by attribute, `secrets.GITHUB_TOKEN`; the files are read at each access.

    A variable of this process goes before one in `.env`, which is looked for next to the
    nearest smokebox.toml from `folder` upwards (by default the working directory), else in
    `folder` itself; or `file` says where it is.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, file: Path | None = None
    ) -> None:
        self._folder = folder
        self._file = file

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.get(name)
        if value is None:
            raise self.missing(name)
        return value

    def get(self, name: str) -> str | None:
        """The value of a variable; None where it is not set, or empty."""
        return os.environ.get(name) or self._read().get(name) or None

    def missing(self, name: str) -> InvalidOption:
        """The error for a variable that nobody has set."""
        return InvalidOption(
            f"the secret {name} is not set: neither in the environment nor in {self.file}.",
            hint=f"Write {name}=... into that file, or export it before the program starts.",
            option=name,
        )

    @property
    def file(self) -> Path:
        """The `.env` that is read, whether or not it is there."""
        if self._file is not None:
            return self._file
        here = Path(self._folder or Path.cwd()).absolute()
        for folder in (here, *here.parents):
            if (folder / PROJECT).is_file():
                return folder / FILE
        return here / FILE

    def __repr__(self) -> str:
        return f"<Secrets of the environment and {self.file}>"

    def _read(self) -> dict[str, str]:
        file = self.file
        try:
            text = file.read_text()
        except (FileNotFoundError, IsADirectoryError):
            return {}
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise InvalidOption(
                f"{file} cannot be read: {reason}.", hint="Mend it.", option=str(file)
            ) from None
        return parse_dotenv(text, str(file))


def parse_dotenv(text: str, file: str = FILE) -> dict[str, str]:
    """The variables of a `.env` file: `NAME=value`, `export NAME='...'`, `NAME="a\\nb"`, comments.

    What is quoted may have several lines. Raises `InvalidOption` with the number of a line
    that is none of these, and never with what is in it.
    """
    found: dict[str, str] = {}
    position = 0
    while position < len(text):
        if nothing := _NOTHING.match(text, position):
            position = nothing.end()
            continue
        entry = _ENTRY.match(text, position)
        if entry is None or (entry["plain"] or "").startswith(("'", '"')):
            line = text.count("\n", 0, position) + 1
            raise InvalidOption(
                f"{file}, line {line}, is not NAME=value.",
                hint="Put a value with quotes or line breaks into quotes of the other kind.",
                option=file,
            )
        found[entry["name"]] = _value(entry)
        position = entry.end()
    return found


def _value(entry: re.Match[str]) -> str:
    if entry["literal"] is not None:
        return entry["literal"]
    if entry["quoted"] is not None:
        return re.sub(
            r"\\(.)",
            lambda escape: _ESCAPES.get(escape[1], escape[1]),
            entry["quoted"],
            flags=re.DOTALL,
        )
    return entry["plain"].strip()
