"""Options of `virtual()` and their validation."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from smokebox.egress.policy import Egress, EgressOption, parse_egress
from smokebox.errors import InvalidOption, PathNotDirectory, PathNotFound
from smokebox.foundation.paths import check_path, resolve
from smokebox.options import check_env
from smokebox.sandbox.filesystems.filesystem import Filesystem
from smokebox.sandbox.virtual.command import Command, check_commands
from smokebox.sandbox.virtual.limits import VirtualLimits, check_limits

Loader: TypeAlias = Callable[[], "str | bytes | Awaitable[str | bytes]"]
FileSource: TypeAlias = str | bytes | Loader
Mount: TypeAlias = "Filesystem | str | os.PathLike[str]"
ShellState: TypeAlias = Literal["persistent", "fresh"]
Isolation: TypeAlias = Literal["thread", "process"]

_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualSettings:
    """Validated options of a virtual sandbox; `fork` passes them on."""

    files: Mapping[str, FileSource]
    mounts: Mapping[str, Filesystem | str]
    cwd: str
    env: Mapping[str, str]
    limits: VirtualLimits
    egress: Egress | None
    commands: Mapping[str, Command]
    python: bool
    shell: ShellState
    user: str

    @property
    def home(self) -> str:
        """The home directory of the user."""
        return f"/home/{self.user}"


def make_settings(
    *,
    files: Mapping[str, FileSource] | None,
    mounts: Mapping[str, Mount] | None,
    cwd: str,
    env: Mapping[str, str] | None,
    limits: VirtualLimits | Mapping[str, float] | None,
    egress: EgressOption | None,
    commands: Mapping[str, Command] | None,
    python: bool,
    shell: str,
    user: str,
) -> VirtualSettings:
    """Validate the options of `virtual()`."""
    place = resolve(cwd, "/")
    _check_choice("shell", shell, ("persistent", "fresh"))
    if not isinstance(user, str) or not _USER.fullmatch(user):
        raise InvalidOption(
            f"{user!r} is not a valid user name.",
            hint="Use lower-case letters, digits, _ and -, starting with a letter.",
            option="user",
            value=user,
        )
    checked_mounts = _check_mounts(mounts)
    return VirtualSettings(
        files=_check_files(files, place, checked_mounts),
        mounts=checked_mounts,
        cwd=place,
        env=check_env(env),
        limits=check_limits(limits),
        egress=None if egress is None else parse_egress(egress),
        commands=check_commands(commands),
        python=bool(python),
        shell="fresh" if shell == "fresh" else "persistent",
        user=user,
    )


def check_isolation(isolation: str) -> None:
    """Raise `InvalidOption` for an unknown isolation."""
    _check_choice("isolation", isolation, ("thread", "process"))


def _check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidOption(
            f"{option} must be {' or '.join(map(repr, choices))}, not {value!r}.",
            hint=f"Leave it out for {choices[0]!r}.",
            option=option,
            value=value,
        )


def _check_files(
    files: Mapping[str, FileSource] | None, cwd: str, mounts: Iterable[str]
) -> dict[str, FileSource]:
    if files is None:
        return {}
    if not isinstance(files, Mapping):
        raise InvalidOption(
            f"files must be a mapping of paths to contents, not {type(files).__name__}.",
            hint="Pass files={'notes.txt': 'text'}.",
            option="files",
        )
    for path, source in files.items():
        if not isinstance(source, (str, bytes)) and not callable(source):
            raise InvalidOption(
                f"the file {path!r} is {type(source).__name__}, not file content.",
                hint="Pass str, bytes, or a function that returns one of them.",
                option="files",
                value=path,
            )
    checked = {resolve(path, cwd): source for path, source in files.items()}
    for path in checked:
        if any(path == point or path.startswith(point + "/") for point in mounts):
            raise InvalidOption(
                f"the file {path} would be hidden by a mount.",
                hint="Choose another path, or write the file after creating the sandbox.",
                option="files",
                value=path,
            )
    return checked


def _check_mounts(mounts: Mapping[str, Mount] | None) -> dict[str, Filesystem | str]:
    if mounts is None:
        return {}
    if not isinstance(mounts, Mapping):
        raise InvalidOption(
            f"mounts must be a mapping of paths to filesystems, not {type(mounts).__name__}.",
            hint="Pass mounts={'/data': 'folder'}.",
            option="mounts",
        )
    checked: dict[str, Filesystem | str] = {}
    for point, mount in mounts.items():
        place = _check_point(point)
        if isinstance(mount, Filesystem):
            checked[place] = mount
        elif isinstance(mount, (str, os.PathLike)):
            checked[place] = _check_folder(os.fspath(mount))
        else:
            raise InvalidOption(
                f"the mount at {point} is {type(mount).__name__}, not a filesystem.",
                hint="Pass a host folder or a smokebox.sandbox.filesystems.Filesystem.",
                option="mounts",
                value=point,
            )
    return checked


def _check_point(point: str) -> str:
    if not check_path(point).startswith("/") or resolve(point, "/") == "/":
        raise InvalidOption(
            f"{point!r} is not a valid mount point.",
            hint="Use an absolute path below the root, such as '/data'.",
            option="mounts",
            value=point,
        )
    return resolve(point, "/")


def _check_folder(folder: str) -> str:
    path = os.path.abspath(folder)
    if not os.path.exists(path):
        raise PathNotFound(path, hint="Pass an existing host folder to mounts=.")
    if not os.path.isdir(path):
        raise PathNotDirectory(
            path, hint="Pass a folder to mounts=; pass single files with files=."
        )
    return path
