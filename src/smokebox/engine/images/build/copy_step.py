"""COPY and ADD: variables expanded, archives unpacked and URLs fetched, ready to be copied."""

from __future__ import annotations

import asyncio
import hashlib
import os
import posixpath
import re
import shutil
import tempfile
import urllib.parse
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn

from smokebox.engine.files.descriptors import closing
from smokebox.engine.files.rooted_files import RootedFiles
from smokebox.engine.images.build.archives import is_archive, unpack
from smokebox.engine.images.build.patterns import has_wildcard
from smokebox.engine.images.build.problems import invalid
from smokebox.engine.images.build.sources import RootSource, clean, digest_tree, expand, follow
from smokebox.engine.images.build.steps import CopyStep
from smokebox.engine.jail.spec import Owner

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Awaitable, Callable

    from smokebox.engine.images.build.instructions import Copy
    from smokebox.engine.images.build.sources import Source
    from smokebox.engine.images.build.variables import Scope

_URL = re.compile(r"https?://", re.IGNORECASE)
_CHECKSUM = re.compile(r"sha256:[0-9a-f]{64}")
# Files fetched from a URL are private, as in Docker.
_URL_MODE = 0o600


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCopy:
    """A copy from one source; None for the stage of `--from`, which is opened when needed."""

    step: CopyStep
    source: Source | None


@dataclass(slots=True, kw_only=True)
class PlannedCopies:
    """All copies of one instruction, in order, and what else its key depends on."""

    copies: list[PlannedCopy] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)

    def reading(self, stage: Source) -> PlannedCopies:
        """Return the copies with the stage that they read."""
        copies = [replace(one, source=stage) if one.step.sources else one for one in self.copies]
        return PlannedCopies(copies=copies, contents=self.contents)


class CopyPlanner:
    """Plans one COPY or ADD."""

    def __init__(self, instruction: Copy, scope: Scope, directory: str, file: str) -> None:
        self._instruction = instruction
        self._scope = scope
        self._file = file
        line = instruction.line
        expand_word = scope.expand
        self.sources = [
            one if one in instruction.heredocs else expand_word(one, line)
            for one in instruction.sources
        ]
        destination = expand_word(instruction.destination, line)
        slash = "/" if destination.endswith(("/", "/.")) or destination in (".", "") else ""
        path = posixpath.normpath(posixpath.join("/", directory, destination))
        self.destination = ("/" + path.strip("/")).rstrip("/") + slash or "/"
        self.owner = expand_word(instruction.owner, line)
        self.mode = self._mode(expand_word(instruction.mode, line))
        if len(self.sources) > 1 and not self.destination.endswith("/"):
            raise invalid(
                file,
                line,
                "several sources need a destination that is a directory",
                "End the destination with a slash.",
            )

    async def plan(
        self,
        source: Source | None,
        fetch: Callable[[str], Awaitable[bytes]],
        stack: contextlib.AsyncExitStack,
    ) -> PlannedCopies:
        """Return the copies to make. Archives are unpacked into a directory of `stack`."""
        planned = PlannedCopies()
        plain: list[str] = []
        for word in self.sources:
            if document := self._instruction.heredocs.get(word):
                data = self._scope.expand_document(document, self._instruction.line).encode(
                    errors="surrogateescape"
                )
                self._add_document(planned, document.name, data, 0o644)
            elif self._instruction.add and _URL.match(word):
                await self._add_url(planned, word, await fetch(word), stack)
            elif self._instruction.add and source is not None:
                await self._add_local(planned, source, word, stack, plain)
            else:
                plain.append(word if self._instruction.parents else clean(word))
        if plain:
            keep_owner = bool(self._instruction.stage)
            step = self._step(tuple(plain), keep_owner=keep_owner)
            planned.copies.append(PlannedCopy(step=step, source=source))
        return planned

    def digest(self, planned: PlannedCopies) -> str:
        """Hash the content of all copies."""
        found = list(planned.contents)
        for one in planned.copies:
            if one.source is None:
                continue
            for pattern in one.step.sources:
                for path in expand(one.source, pattern):
                    keep_owner = one.step.keep_owner
                    found.append(f"{path} {digest_tree(one.source, path, keep_owner=keep_owner)}")
        return hashlib.sha256("\0".join(found).encode(errors="surrogateescape")).hexdigest()

    def key_parts(self) -> tuple[object, ...]:
        """Return what the key of the step depends on besides the content."""
        instruction = self._instruction
        return (
            "ADD" if instruction.add else "COPY",
            self.sources,
            self.destination,
            self.owner,
            self.mode,
            instruction.parents,
            instruction.excludes,
            instruction.unpack,
        )

    def _step(
        self,
        sources: tuple[str, ...],
        *,
        keep_owner: bool = False,
        documents: dict[str, bytes] | None = None,
        mode: int | None = None,
        destination: str = "",
    ) -> CopyStep:
        return CopyStep(
            sources=sources,
            destination=destination or self.destination,
            owner=self.owner,
            mode=self.mode if self.mode is not None else mode,
            keep_owner=keep_owner,
            parents=self._instruction.parents,
            excludes=self._instruction.excludes,
            documents=documents or {},
        )

    def _add_document(self, planned: PlannedCopies, name: str, data: bytes, mode: int) -> None:
        step = self._step((), documents={name: data}, mode=mode)
        planned.copies.append(PlannedCopy(step=step, source=None))
        planned.contents.append(f"{name} {hashlib.sha256(data).hexdigest()}")

    async def _add_url(
        self, planned: PlannedCopies, url: str, data: bytes, stack: contextlib.AsyncExitStack
    ) -> None:
        found = f"sha256:{hashlib.sha256(data).hexdigest()}"
        wanted = self._instruction.checksum
        if wanted and not _CHECKSUM.fullmatch(wanted):
            self._fail(f"--checksum={wanted} is not a digest", "Write sha256: and 64 digits.")
        if wanted and found != wanted:
            self._fail(f"{url} has the digest {found}, not {wanted}", "Check the URL.")
        if self._instruction.unpack and is_archive(data[:512]):
            await self._add_archive(planned, data, stack)
            return
        name = posixpath.basename(urllib.parse.urlsplit(url).path)
        if not name and self.destination.endswith("/"):
            self._fail(f"{url} has no file name", "Name the file in the destination.")
        self._add_document(planned, urllib.parse.unquote(name), data, _URL_MODE)

    async def _add_local(
        self,
        planned: PlannedCopies,
        source: Source,
        word: str,
        stack: contextlib.AsyncExitStack,
        plain: list[str],
    ) -> None:
        """Add a source of ADD, which is unpacked if it is an archive."""
        for path in expand(source, clean(word)) if has_wildcard(word) else [clean(word)]:
            place = follow(source, path)
            entry = source.entry(place) if place is not None else None
            if entry is None or not entry.is_file or self._instruction.unpack is False:
                plain.append(path)
                continue
            with closing(source.open(entry)) as fd:
                if not is_archive(os.pread(fd, 512, 0)):
                    plain.append(path)
                    continue
                planned.contents.append(f"{path} {entry.content}")
                await self._add_archive(planned, fd, stack)

    async def _add_archive(
        self, planned: PlannedCopies, archive: bytes | int, stack: contextlib.AsyncExitStack
    ) -> None:
        directory = tempfile.mkdtemp(prefix="smokebox-add-")
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        await asyncio.to_thread(unpack, archive, directory)
        root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, root)
        single = os.geteuid() != 0
        owner = Owner(
            uid=os.geteuid() if single else 0,
            gid=os.getegid() if single else 0,
            count=1 if single else 1 << 16,
        )
        source = RootSource(RootedFiles(root, owner))
        destination = self.destination.rstrip("/") + "/"
        step = self._step(("",), keep_owner=True, destination=destination)
        planned.copies.append(PlannedCopy(step=step, source=source))

    def _mode(self, text: str) -> int | None:
        if not text:
            return None
        if not re.fullmatch(r"[0-7]{1,4}", text):
            self._fail(f"--chmod={text} is not an octal mode", "Write --chmod=0755.")
        return int(text, 8)

    def _fail(self, problem: str, hint: str) -> NoReturn:
        raise invalid(self._file, self._instruction.line, problem, hint)
