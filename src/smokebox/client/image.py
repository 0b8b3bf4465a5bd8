"""Images declared in Python: the instructions of a Dockerfile, with the same layers and cache."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from smokebox.errors import InvalidOption
from smokebox.options import check_env

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.client.build_context import BuildContext

_APT = (
    "apt-get update && apt-get install -y --no-install-recommends {} && rm -rf /var/lib/apt/lists/*"
)
_PACKAGE = re.compile(r"[A-Za-z0-9@][^\s;&|<>`$(){}'\"\\]*")
_PIP_PACKAGE = re.compile(r"[A-Za-z0-9./][^\n`$\\]*")
# One line that neither begins like a flag, a list or a heredoc nor ends in an escape character.
_PLAIN = re.compile(r"[^\s\[<-][^\n]*(?<![\\`\s])")
_REFERENCE = re.compile(r"[^\s$]+")


_PREFIX = "declared:"
FILE_PREFIXES = ("oci:", "archive:")
"""Prefixes of images that are loaded from files here."""

_declared: dict[str, Image] = {}


@dataclass(frozen=True, slots=True)
class Image:
    """An image to build, from a base and steps. Immutable: each method returns another image.

    `Image.from_registry("debian:12").apt_install("ffmpeg").pip_install("pandas")` is for `image=`
    of a sandbox. Steps that were built before come from the cache.
    """

    _lines: tuple[str, ...]
    _copies: tuple[tuple[str, str], ...] = ()
    _context: BuildContext | None = None

    @classmethod
    def host(cls) -> Self:
        """Start from the programs of the server's host."""
        return cls(("FROM host",))

    @classmethod
    def from_registry(cls, reference: str) -> Self:
        """Start from an image of a registry, such as "python:3.12-slim", or of the server."""
        if not isinstance(reference, str) or not _REFERENCE.fullmatch(reference):
            raise _invalid("reference", reference, "the name of an image")
        return cls((f"FROM {reference}",))

    @classmethod
    def from_dockerfile(cls, path: str | os.PathLike[str]) -> Self:
        """Start from what a Dockerfile builds, which is read here and now.

        Args:
            path: A Dockerfile, or a directory with one. Its directory is the build context.

        Raises:
            PathError: A file cannot be read.
        """
        from smokebox.client.build_context import read_context

        context = read_context(path)
        return cls((context.dockerfile.rstrip("\n"),), (), context)

    def apt_install(self, *packages: str) -> Self:
        """Install packages of Debian or Ubuntu."""
        return self._run(_APT.format(_words("apt_install", packages, _PACKAGE)))

    def pip_install(self, *packages: str) -> Self:
        """Install Python packages, with versions as pip takes them."""
        words = _words("pip_install", packages, _PIP_PACKAGE)
        return self._run(f"python3 -m pip install --no-cache-dir --break-system-packages {words}")

    def npm_install(self, *packages: str) -> Self:
        """Install npm packages for all users."""
        return self._run(f"npm install --global {_words('npm_install', packages, _PACKAGE)}")

    def run(self, *commands: str | Sequence[str]) -> Self:
        """Run commands, each a step: text for the shell, or a list of literal words."""
        image = self
        for command in commands:
            if isinstance(command, str):
                image = image._run(command)
            else:
                image = image._add(f"RUN {json.dumps(list(command))}")
        return image

    def copy(self, source: str | os.PathLike[str], destination: str) -> Self:
        """Copy a local file, or the content of a local directory.

        Args:
            source: Path here, read when the image is built.
            destination: Path in the image; with a slash at the end it is a directory.
        """
        place = f".smokebox/{len(self._copies)}/{os.path.basename(os.path.abspath(source))}"
        copies = (*self._copies, (os.path.abspath(source), place))
        line = f"COPY {json.dumps([place, _literal(destination)])}"
        return replace(self._add(line), _copies=copies)

    def env(self, **variables: str) -> Self:
        """Set environment variables."""
        pairs = [f"{name}={_quoted(value)}" for name, value in check_env(variables).items()]
        return self._add(f"ENV {' '.join(pairs)}") if pairs else self

    def workdir(self, path: str) -> Self:
        """Set the working directory, and create it."""
        return self._add(f"WORKDIR {_literal(_line('path', path))}")

    def user(self, name: str) -> Self:
        """Set the user of later steps and of the image's commands."""
        return self._add(f"USER {_literal(_line('user', name))}")

    @property
    def name(self) -> str:
        """Name of the image among those declared in this process, for the settings of sandboxes."""
        name = _PREFIX + hashlib.sha256(repr(self).encode()).hexdigest()
        _declared[name] = self
        return name

    @property
    def dockerfile(self) -> str:
        """The Dockerfile with all steps."""
        return "\n".join(self._lines) + "\n"

    def context(self) -> BuildContext:
        """Return the Dockerfile with the files that it copies, which are read and hashed here.

        Raises:
            PathError: A file cannot be read.
        """
        from smokebox.client.build_context import BuildContext

        base = self._context or BuildContext(dockerfile="", file="Image")
        context = replace(base, dockerfile=self.dockerfile)
        for source, place in self._copies:
            context = context.with_tree(source, place)
        return context

    def _run(self, command: str) -> Self:
        if not isinstance(command, str) or not command.strip():
            raise _invalid("command", command, "text for the shell")
        if _PLAIN.fullmatch(command) and "<<" not in command:
            return self._add(f"RUN {command}")
        # Text that would mean something else in a Dockerfile.
        return self._add(f"RUN {json.dumps(['/bin/sh', '-c', command])}")

    def _add(self, line: str) -> Self:
        return replace(self, _lines=(*self._lines, line))


def _words(method: str, packages: tuple[str, ...], pattern: re.Pattern[str]) -> str:
    if not packages:
        raise _invalid("packages", packages, f"one or more names for {method}()")
    for package in packages:
        if not isinstance(package, str) or not pattern.fullmatch(package):
            raise _invalid("packages", package, "the name of a package")
    return shlex.join(packages)


def _line(option: str, text: object) -> str:
    if not isinstance(text, str) or not text or "\n" in text:
        raise _invalid(option, text, "text in one line")
    return text


def _literal(text: str) -> str:
    """Return text that is not expanded as variables."""
    return text.replace("\\", "\\\\").replace("$", "\\$")


def _quoted(value: str) -> str:
    if "\n" in value:
        raise _invalid("env", value, "text in one line")
    escaped = _literal(value).replace('"', '\\"')
    return f'"{escaped}"'


def _invalid(option: str, value: object, wanted: str) -> InvalidOption:
    return InvalidOption(
        f"{option} is {wanted}, not {value!r:.200}.",
        hint="See help(smokebox.Image).",
        option=option,
        value=value,
    )


def is_local(image: str | None) -> bool:
    """Return True for an image that is built from files here: a path, or one declared in Python."""
    return image is not None and image.startswith((_PREFIX, "./", "../", "/"))


def is_image_file(image: str | None) -> bool:
    """Return True for an image that is loaded from files here: `oci:DIR` or `archive:FILE`."""
    return image is not None and image.startswith(FILE_PREFIXES)


def absolute_image(image: str, directory: str = "") -> str:
    """Return an image whose path, if it is one of files here, does not depend on a directory.

    A relative one is relative to `directory`, by default the current one.
    """
    prefix = next((one for one in FILE_PREFIXES if image.startswith(one)), "")
    if not prefix and not image.startswith(("./", "../")):
        return image
    path = os.path.expanduser(image.removeprefix(prefix))
    return prefix + os.path.abspath(os.path.join(directory, path))


def local_context(image: str) -> BuildContext:
    """Read the context of an image for which `is_local` is true.

    Raises:
        PathError: A file cannot be read.
    """
    from smokebox.client.build_context import read_context

    declared = _declared.get(image)
    return read_context(image) if declared is None else declared.context()
