"""Collects a command's output within bounds, and shows a model its end."""

from __future__ import annotations

import secrets
from collections import deque
from typing import TYPE_CHECKING

from smokebox.agents.tools.truncation import MAX_BYTES, MAX_LINES, fitting, tail
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import ExecResult

# Both ends together stay below the 10 MB that a file in the virtual sandbox may have.
KEPT_BYTES_PER_END = 4 * 1024 * 1024
KEPT_FILES = 16


class Output:
    """The beginning and the end of an output of any length, in bounded memory."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0
        self._line_breaks = 0

    def add(self, text: str) -> None:
        """Take the next piece."""
        data = text.encode()
        self._size += len(data)
        self._line_breaks += data.count(b"\n")
        if not self._tail and len(self._head) + len(data) <= KEPT_BYTES_PER_END:
            self._head += data
            return
        self._tail += data
        if len(self._tail) > 2 * KEPT_BYTES_PER_END:
            del self._tail[:-KEPT_BYTES_PER_END]

    async def shown(self, files: OutputFiles, result: ExecResult) -> str:
        """All of it, or the end behind a line that says how much there was and where it is."""
        kept = self._kept()
        end = _end(kept)
        if len(end) == self._size:
            return end.decode().rstrip("\n")
        lines, total = _lines(end), self._line_breaks + (not kept.endswith(b"\n"))
        where = _kept_by(result) or await files.keep(kept)
        marker = f"[Showing the last {lines} of {total} lines, {len(end)} of {self._size} bytes."
        return f"{marker} {where}]\n{end.decode()}".rstrip("\n")

    def _kept(self) -> bytes:
        rest = tail(bytes(self._tail), KEPT_BYTES_PER_END)
        left_out = self._size - len(self._head) - len(rest)
        gap = f"\n[{left_out} bytes of the output were not kept.]\n".encode() if left_out else b""
        return b"".join((self._head, gap, rest))


class OutputFiles:
    """The files in the sandbox that hold whole outputs; the oldest go when there are many."""

    def __init__(self, sandbox: SandboxApi, directory: str) -> None:
        self._sandbox = sandbox
        self._directory = directory.rstrip("/")
        self._paths: deque[str] = deque()

    async def keep(self, data: bytes) -> str:
        """Write `data` to a file, and say where it is or why it is not."""
        path = f"{self._directory}/smokebox-output-{secrets.token_hex(8)}.txt"
        try:
            await self._sandbox.write_file(path, data)
            self._paths.append(path)
            if len(self._paths) > KEPT_FILES:
                await self._sandbox.rm(self._paths.popleft(), force=True)
        except SmokeboxError as error:
            return f"The rest could not be kept: {error.message}"
        return f"The output is in {path}."


def _kept_by(result: ExecResult) -> str:
    """Where the sandbox itself kept the output."""
    if result.stdout_file is None:
        return ""
    errors = f", standard error in {result.stderr_file}" if result.stderr_file else ""
    return f"The output is in {result.stdout_file}{errors}."


def _end(data: bytes) -> bytes:
    """The last whole lines that fit, or the last bytes where long lines leave much room."""
    body = data.removesuffix(b"\n")
    lines = body[-MAX_BYTES - 1 :].split(b"\n")
    count = fitting(map(len, reversed(lines)), MAX_LINES)
    end = b"\n".join(lines[len(lines) - count :])
    if count < MAX_LINES and len(end) < MAX_BYTES // 2:
        return tail(data, MAX_BYTES)
    return end + data[len(body) :]


def _lines(data: bytes) -> int:
    return data.count(b"\n") + (not data.endswith(b"\n"))
