"""LangChain Deep Agents backend over any sandbox: `create_deep_agent(backend=...)`.

Deep Agents calls backends from sync and async code. Both run on one background loop, so that a
sandbox is only used on a single loop.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import posixpath
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, Self

from smokebox.errors import (
    AccessDenied,
    InvalidPath,
    NotText,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    SandboxGone,
    SmokeboxError,
)
from smokebox.foundation.ids import new_id
from smokebox.integrations import missing_framework
from smokebox.integrations.command import byte_length, run_truncated
from smokebox.options import check_timeout
from smokebox.sandbox.background_loop import BackgroundLoop

try:
    from deepagents.backends.protocol import (
        DeleteResult,
        EditResult,
        ExecuteResponse,
        FileData,
        FileDownloadResponse,
        FileInfo,
        FileUploadResponse,
        GlobResult,
        GrepMatch,
        GrepResult,
        LsResult,
        ReadResult,
        SandboxBackendProtocol,
        WriteResult,
    )
    from deepagents.backends.sandbox import MAX_BINARY_BYTES, MAX_OUTPUT_BYTES, TRUNCATION_MSG
    from deepagents.backends.utils import (
        EMPTY_CONTENT_WARNING,
        EMPTY_OLD_STRING_ERROR,
        InvalidGlobPatternError,
        # Private, but it decides whether Deep Agents treats a file as an image or as text.
        _get_backend_read_file_type,
        compile_grep_include_glob,
        normalize_read_bounds,
    )
except ImportError as error:
    raise missing_framework("deepagents", extra="deepagents") from error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from smokebox.sandbox.api import SandboxApi

DEFAULT_TIMEOUT = 120.0
MAX_OUTPUT = 1024 * 1024
MAX_FILE = 64 * 1024 * 1024
MAX_MATCHES = 10_000
SEARCH_TIMEOUT = 30.0

MAX_LINES = 100_000

_UNIQUE = (
    "For multiple occurrences use replace_all=True, or add text around it so that it is unique."
)

# Skipped when a search starts at the root: they are endless and hold no files.
_VIRTUAL_FILESYSTEMS = frozenset({"proc", "sys", "dev"})

_WILDCARDS = frozenset("*?[]{}\\")

# `.git` holds packs, which contain no text. NUL after the name, because names may contain colons.
_GREP = 'grep -rHnFZI --exclude-dir=.git -e "$SMOKEBOX_PATTERN" -- "$SMOKEBOX_ROOT"'


class SmokeboxBackend(SandboxBackendProtocol):
    """A sandbox as the files and the shell of a deep agent.

    The backend owns the sandbox: it uses it on its own event loop, and closes it in `close()` or
    at the end of a `with` block.

    Args:
        sandbox: The sandbox.
        timeout: Default timeout of commands in seconds; None for no limit.
    """

    def __init__(self, sandbox: SandboxApi, *, timeout: float | None = DEFAULT_TIMEOUT) -> None:
        self._sandbox = sandbox
        self._timeout = check_timeout(timeout)
        self._loop = BackgroundLoop()
        self._id = new_id("smokebox")
        self._closed = False

    @property
    def id(self) -> str:
        """Unique name of this backend."""
        return self._id

    def close(self) -> None:
        """Close the sandbox and end the background loop. Safe to repeat."""
        if not self._closed:
            self._closed = True
            try:
                self._loop.run(self._sandbox.aclose())
            finally:
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a bash command; a `timeout` of 0 means no limit."""
        return self._loop.run(self._execute(command, timeout))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a bash command; cancelling kills it."""
        return await self._loop.call(self._execute(command, timeout))

    def ls(self, path: str) -> LsResult:
        """List a directory."""
        return self._loop.run(self._ls(path))

    async def als(self, path: str) -> LsResult:
        """List a directory."""
        return await self._loop.call(self._ls(path))

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        """Return a page of a text file, or a whole small binary file in base64."""
        return self._loop.run(self._read(file_path, offset, limit))

    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        """Return a page of a text file, or a whole small binary file in base64."""
        return await self._loop.call(self._read(file_path, offset, limit))

    def write(self, file_path: str, content: str) -> WriteResult:
        """Create or replace a file and its parent directories."""
        return self._loop.run(self._write(file_path, content))

    async def awrite(self, file_path: str, content: str) -> WriteResult:
        """Create or replace a file and its parent directories."""
        return await self._loop.call(self._write(file_path, content))

    def edit(
        self, file_path: str, old_string: str, new_string: str, replace_all: bool = False
    ) -> EditResult:
        """Replace the only occurrence of a text in a file, or all of them."""
        return self._loop.run(self._edit(file_path, old_string, new_string, replace_all))

    async def aedit(
        self, file_path: str, old_string: str, new_string: str, replace_all: bool = False
    ) -> EditResult:
        """Replace the only occurrence of a text in a file, or all of them."""
        return await self._loop.call(self._edit(file_path, old_string, new_string, replace_all))

    def delete(self, file_path: str) -> DeleteResult:
        """Remove a file or a directory tree, except the working directory."""
        return self._loop.run(self._delete(file_path))

    async def adelete(self, file_path: str) -> DeleteResult:
        """Remove a file or a directory tree, except the working directory."""
        return await self._loop.call(self._delete(file_path))

    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        """Return the regular files under `path` that match, by Deep Agents' pattern rules."""
        return self._loop.run(self._glob(pattern, path))

    async def aglob(self, pattern: str, path: str | None = None) -> GlobResult:
        """Return the regular files under `path` that match, by Deep Agents' pattern rules."""
        return await self._loop.call(self._glob(pattern, path))

    def grep(
        self,
        pattern: str,
        path: str | None = None,
        glob: str | None = None,
        *,
        max_count: int | None = None,
    ) -> GrepResult:
        """Return the lines that contain `pattern` literally, in text files that match `glob`."""
        return self._loop.run(self._grep(pattern, path, glob, max_count))

    async def agrep(
        self,
        pattern: str,
        path: str | None = None,
        glob: str | None = None,
        *,
        max_count: int | None = None,
    ) -> GrepResult:
        """Return the lines that contain `pattern` literally, in text files that match `glob`."""
        return await self._loop.call(self._grep(pattern, path, glob, max_count))

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files independently: one that fails does not stop the next."""
        return self._loop.run(self._upload(files))

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files independently: one that fails does not stop the next."""
        return await self._loop.call(self._upload(files))

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read files independently: one that fails does not stop the next."""
        return self._loop.run(self._download(paths))

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read files independently: one that fails does not stop the next."""
        return await self._loop.call(self._download(paths))

    async def _execute(self, command: str, timeout: int | None) -> ExecuteResponse:
        seconds = self._timeout if timeout is None else timeout or None
        try:
            done = await run_truncated(self._sandbox, command, timeout=seconds, limit=MAX_OUTPUT)
        except SandboxGone:
            raise
        except SmokeboxError as error:
            # An error in the call, which the model can fix once it sees the message.
            return ExecuteResponse(output=f"Error: {error}", exit_code=1)
        return ExecuteResponse(
            output=done.output, exit_code=done.exit_code, truncated=done.truncated
        )

    async def _ls(self, path: str) -> LsResult:
        try:
            names = await self._sandbox.readdir(path)
            root = self._sandbox.resolve_path(path)
            return LsResult(entries=[await self._entry(posixpath.join(root, n)) for n in names])
        except PathNotDirectory:
            return LsResult(error=f"Path '{path}': not_a_directory")
        except SmokeboxError as error:
            return LsResult(error=f"Path '{path}': {_reason(error)}")

    async def _entry(self, path: str) -> FileInfo:
        try:
            info = await self._sandbox.stat(path, follow_symlinks=False)
        except PathNotFound:
            return FileInfo(path=path)
        entry = FileInfo(path=path, is_dir=info.is_directory)
        if info.size is not None:
            entry["size"] = info.size
        if info.mtime is not None:
            entry["modified_at"] = datetime.fromtimestamp(info.mtime, UTC).isoformat()
        return entry

    async def _read(self, path: str, offset: int, limit: int) -> ReadResult:
        try:
            info = await self._sandbox.stat(path)
            if info.is_file and (info.size or 0) > MAX_FILE:
                hint = "read a part of it with a command such as sed -n '1,100p'"
                return ReadResult(error=f"File '{path}': larger than {MAX_FILE} bytes; {hint}")
            data = await self._sandbox.read_bytes(path)
        except SmokeboxError as error:
            return ReadResult(error=f"File '{path}': {_reason(error)}")
        text = _text(path, data)
        if text is None:
            return _binary_page(path, data)
        return _text_page(path, text, offset, limit)

    async def _write(self, path: str, content: str) -> WriteResult:
        try:
            await self._sandbox.write_file(_absolute(path), content)
        except SmokeboxError as error:
            return WriteResult(error=f"Failed to write file '{path}': {_reason(error)}")
        return WriteResult(path=path)

    async def _edit(self, path: str, old: str, new: str, every: bool) -> EditResult:
        if not old:
            return EditResult(error=EMPTY_OLD_STRING_ERROR)
        try:
            text = await self._sandbox.read_file(_absolute(path))
            replacement = _match_line_endings(text, old, new)
            count = text.count(replacement.old)
            if count == 0:
                return EditResult(error=f"Error: String not found in file: '{old}'")
            if count > 1 and not every:
                return EditResult(error=f"Error: String '{old}' appears {count} times. {_UNIQUE}")
            await self._sandbox.write_file(path, text.replace(replacement.old, replacement.new))
        except PathNotFound:
            return EditResult(error=f"Error: File '{path}' not found")
        except SmokeboxError as error:
            return EditResult(error=f"Error editing file '{path}': {_reason(error)}")
        return EditResult(path=path, occurrences=count)

    async def _delete(self, path: str) -> DeleteResult:
        try:
            target = self._sandbox.resolve_path(_absolute(path))
            if f"{self._sandbox.cwd}/".startswith(f"{target.rstrip('/')}/"):
                return DeleteResult(
                    error=f"Error: '{path}' is the working directory or contains it"
                )
            await self._sandbox.rm(target, recursive=True)
        except PathNotFound:
            return DeleteResult(error=f"Error: '{path}' not found")
        except SmokeboxError as error:
            return DeleteResult(error=f"Error deleting file '{path}': {_reason(error)}")
        return DeleteResult(path=path)

    async def _glob(self, pattern: str, path: str | None) -> GlobResult:
        where = path or self._sandbox.cwd
        matches: list[FileInfo] = []
        try:
            accepts = compile_grep_include_glob(pattern)
            root = self._sandbox.resolve_path(where)
            if not (await self._sandbox.stat(root)).is_directory:
                return GlobResult(error=f"Path '{where}': not_a_directory")
            async with asyncio.timeout(SEARCH_TIMEOUT):
                async for file in self._files(_search_root(root, pattern)):
                    if accepts(_relative(root, file)):
                        matches.append(FileInfo(path=file, is_dir=False))
                    if len(matches) > MAX_MATCHES:
                        raise TimeoutError
        except TimeoutError:
            matches = matches[:MAX_MATCHES]
            return GlobResult(matches=matches, truncated=True, truncation_reason="budget")
        except InvalidGlobPatternError as error:
            return GlobResult(error=str(error))
        except SmokeboxError as error:
            return GlobResult(error=f"Path '{where}': {_reason(error)}")
        return GlobResult(matches=matches)

    async def _files(self, root: str) -> AsyncIterator[str]:
        """Yield all regular files under `root`, including hidden ones."""
        if root != "/":
            for file in await self._sandbox.glob("**/*", cwd=root, hidden=True, files_only=True):
                yield file
            return
        for file in await self._sandbox.glob("*", cwd=root, hidden=True, files_only=True):
            yield file
        for name in await self._sandbox.readdir(root):
            if name not in _VIRTUAL_FILESYSTEMS and (await self._entry(f"/{name}")).get("is_dir"):
                async for file in self._files(f"/{name}"):
                    yield file

    async def _grep(
        self, pattern: str, path: str | None, glob: str | None, max_count: int | None
    ) -> GrepResult:
        where = path or self._sandbox.cwd
        if "\0" in pattern:
            return GrepResult(error="a line of text cannot contain NUL: remove it from the pattern")
        try:
            accepts = compile_grep_include_glob(glob) if glob else None
            root = self._sandbox.resolve_path(where)
            is_directory = (await self._sandbox.stat(root)).is_directory
            parser = _GrepParser(root if is_directory else posixpath.dirname(root), accepts)
            return await self._search(parser, pattern, root, max_count)
        except InvalidGlobPatternError as error:
            return GrepResult(error=str(error))
        except SmokeboxError as error:
            return GrepResult(error=f"Path '{where}': {_reason(error)}")

    async def _search(
        self, parser: _GrepParser, pattern: str, root: str, max_count: int | None
    ) -> GrepResult:
        limit = MAX_LINES if max_count is None else max_count
        # In the C locale only a NUL makes a file binary, not a byte that is not UTF-8.
        env = {"SMOKEBOX_PATTERN": pattern, "SMOKEBOX_ROOT": root, "LC_ALL": "C"}
        errors = ""
        async with self._sandbox.exec_stream(_GREP, env=env, timeout=SEARCH_TIMEOUT) as stream:
            async for chunk in stream:
                if chunk.stream == "stderr":
                    errors += chunk.data[:1000]
                    continue
                parser.feed(chunk.data)
                if len(parser.matches) > limit:
                    return GrepResult(matches=parser.matches[:limit], truncated=True)
        # Exit code 1 means no match; above it grep failed, but its earlier matches are valid.
        if stream.exit_code > 1 and not parser.matches:
            return GrepResult(error=f"Path '{root}': {errors.strip() or 'grep failed'}")
        return GrepResult(matches=parser.matches, truncated=stream.exit_code > 1)

    async def _upload(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        responses = []
        for path, content in files:
            error = None
            try:
                await self._sandbox.write_file(_absolute(path), content)
            except SmokeboxError as caught:
                error = _reason(caught)
            responses.append(FileUploadResponse(path=path, error=error))
        return responses

    async def _download(self, paths: list[str]) -> list[FileDownloadResponse]:
        responses = []
        for path in paths:
            try:
                content = await self._sandbox.read_bytes(_absolute(path))
                responses.append(FileDownloadResponse(path=path, content=content))
            except SmokeboxError as error:
                responses.append(FileDownloadResponse(path=path, error=_reason(error)))
        return responses


class _GrepParser:
    """Incremental parser of grep's output: a name, a NUL, a line number, a colon, a line."""

    def __init__(self, root: str, accepts: Callable[[str], bool] | None) -> None:
        self._root = root
        self._accepts = accepts
        self._rest = ""
        self.matches: list[GrepMatch] = []

    def feed(self, data: str) -> None:
        text = self._rest + data
        start = 0
        while (nul := text.find("\0", start)) >= 0 and (end := text.find("\n", nul)) >= 0:
            self._add(text[start:nul], text[nul + 1 : end])
            start = end + 1
        self._rest = text[start:]

    def _add(self, path: str, line: str) -> None:
        if self._accepts is None or self._accepts(_relative(self._root, path)):
            number, _, content = line.partition(":")
            match = GrepMatch(path=path, line=int(number), text=content.removesuffix("\r"))
            self.matches.append(match)


class _EditPair(NamedTuple):
    old: str
    new: str


def _match_line_endings(text: str, old: str, new: str) -> _EditPair:
    """Return `old` and `new` with the line endings of the file, which pages show as newlines."""
    plain = _EditPair(old.replace("\r\n", "\n"), new.replace("\r\n", "\n"))
    windows = _EditPair(plain.old.replace("\n", "\r\n"), plain.new.replace("\n", "\r\n"))
    choices = (_EditPair(old, new), windows, plain)
    return next((choice for choice in choices if choice.old in text), choices[0])


def _text(path: str, data: bytes) -> str | None:
    """Return the text of a file, or None if it is binary by its name or its bytes."""
    if data and _get_backend_read_file_type(path) != "text":
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _binary_page(path: str, data: bytes) -> ReadResult:
    if len(data) > MAX_BINARY_BYTES:
        limit = f"maximum preview size of {MAX_BINARY_BYTES} bytes"
        return ReadResult(error=f"File '{path}': Binary file exceeds {limit}")
    content = base64.b64encode(data).decode()
    return ReadResult(file_data=FileData(content=content, encoding="base64"))


def _text_page(path: str, text: str, offset: int, limit: int) -> ReadResult:
    """Return the lines from `offset` on, as many as `limit` and the page size allow."""
    if not text:
        return ReadResult(file_data=FileData(content=EMPTY_CONTENT_WARNING, encoding="utf-8"))
    offset, limit = normalize_read_bounds(offset, limit)
    if limit == 0:
        return ReadResult(file_data=FileData(content="", encoding="utf-8"), no_lines_requested=True)
    lines = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
    if offset >= len(lines):
        reason = f"Line offset {offset} exceeds file length ({len(lines)} lines)"
        return ReadResult(error=f"File '{path}': {reason}")
    page = lines[offset : offset + limit]
    shown = _count_fitting(page)
    content = "\n".join(page[:shown])
    if shown < len(page):
        # A line that is too long for a page must still advance the reader.
        room = MAX_OUTPUT_BYTES - byte_length(TRUNCATION_MSG)
        content = content or page[0].encode()[:room].decode(errors="ignore")
        content += TRUNCATION_MSG
    end = offset + max(shown, 1)
    return ReadResult(
        file_data=FileData(content=content, encoding="utf-8"),
        total_lines=len(lines),
        start_line=offset + 1,
        end_line=end,
        next_offset=end if end < len(lines) else None,
    )


def _count_fitting(lines: list[str]) -> int:
    """Return how many of `lines` fit on one page."""
    room = MAX_OUTPUT_BYTES - byte_length(TRUNCATION_MSG)
    for count, line in enumerate(lines):
        room -= byte_length(line) + 1
        if room < 0:
            return count
    return len(lines)


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise InvalidPath(f"{path!r} is not absolute.", hint="Start it with '/'.", path=path)
    return path


def _search_root(root: str, pattern: str) -> str:
    """Return the directory that contains every match of a pattern that names directories."""
    *folders, _ = pattern.strip("/").split("/")
    plain = itertools.takewhile(lambda name: not _WILDCARDS.intersection(name), folders)
    return posixpath.normpath(posixpath.join(root, *plain))


def _relative(root: str, path: str) -> str:
    """Return `path` relative to `root`."""
    return path.removeprefix(root).lstrip("/")


def _reason(error: SmokeboxError) -> str:
    """Return Deep Agents' code for an error, or our message if it has none."""
    for kind, code in _REASONS.items():
        if isinstance(error, kind):
            return code
    return str(error)


_REASONS: dict[type[SmokeboxError], str] = {
    PathNotFound: "file_not_found",
    PathIsDirectory: "is_directory",
    PathNotDirectory: "invalid_path",
    AccessDenied: "permission_denied",
    InvalidPath: "invalid_path",
    NotText: "not_a_text_file",
}
