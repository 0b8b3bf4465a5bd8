"""`zcat` and `gzcat`: decompress gzip files to stdout."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from smokebox.errors import PathError
from smokebox.sandbox.virtual.command import describe
from smokebox.sandbox.virtual.commands.arguments import UsageError, parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.sandbox.virtual.command import CommandStream

_LONG = {"force": "f", "stdout": "c", "decompress": "d", "keep": "k", "quiet": "q"}
_STEP = 256 * 1024


class _NotGzip(Exception):
    """Data that cannot be decompressed; the text says why."""


async def zcat(call: CommandStream) -> int:
    """Print the content of each file, or of stdin."""
    try:
        arguments = parse(call.args, "cdfkqv", _LONG)
    except UsageError as error:
        await call.write_error(f"{call.name}: {error}\n")
        return 1
    code = 0
    for name in arguments.operands or ["-"]:
        try:
            await _one(call, name, loose=arguments.has("f"))
        except (PathError, _NotGzip) as error:
            reason = describe(error).rpartition(": ")[2]
            await call.write_error(f"gzip: {'stdin' if name == '-' else name}: {reason}\n")
            code = 1
    return code


async def _one(call: CommandStream, name: str, *, loose: bool) -> None:
    if name == "-":
        data = await call.read()
    else:
        # `zcat a` finds `a.gz`.
        bare = name.startswith("/dev/") or call.files.exists(call.path(name))
        data = call.read_file(name if bare or name.endswith(".gz") else f"{name}.gz")
    if loose and data[:2] != b"\x1f\x8b":
        return await call.write(data)
    for piece in unpacked(data):
        await call.write(piece)
    return None


def unpacked(data: bytes) -> Iterator[bytes]:
    """Yield the content of every member, in chunks of bounded size."""
    if not data:
        raise _NotGzip("unexpected end of file")
    first = True
    while data:
        if data[:2] != b"\x1f\x8b":
            if first:
                raise _NotGzip("not in gzip format")
            if data.strip(b"\0"):
                raise _NotGzip("decompression OK, trailing garbage ignored")
            return
        first = False
        member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        while not member.eof:
            try:
                yield member.decompress(data, _STEP)
            except zlib.error:
                raise _NotGzip("invalid compressed data--format violated") from None
            data = member.unconsumed_tail
            if not data and not member.eof:
                raise _NotGzip("unexpected end of file")
        data = member.unused_data
