"""Body of a curl request, from `-d`, `-F`, `-T` and related options."""

from __future__ import annotations

import mimetypes
import posixpath
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from smokebox.errors import PathError
from smokebox.sandbox.virtual.connection import FetchFailed

if TYPE_CHECKING:
    from smokebox.sandbox.virtual.command import CommandStream
    from smokebox.sandbox.virtual.commands.curl_options import CurlOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class CurlBody:
    """Body to send, and its default content type."""

    data: bytes
    content_type: str | None = None


async def read_input(call: CommandStream, name: str) -> bytes:
    """Read a file that the command line names, or all of stdin for `-`."""
    if name == "-":
        return await call.read()
    try:
        return call.read_file(name)
    except PathError:
        raise FetchFailed(26, f"Failed to open {name}") from None


async def make_body(call: CommandStream, options: CurlOptions) -> CurlBody | None:
    """Return the body, or None if there is none."""
    if options.forms:
        return await _multipart(call, options.forms)
    if options.upload is not None:
        return CurlBody(data=await read_input(call, options.upload))
    if not options.data:
        return None
    separator = b"" if options.json else b"&"
    data = separator.join([await _piece(call, kind, text) for kind, text in options.data])
    kind = "application/json" if options.json else "application/x-www-form-urlencoded"
    return CurlBody(data=data, content_type=kind)


async def _piece(call: CommandStream, kind: str, text: str) -> bytes:
    if kind == "urlencode":
        return await _urlencoded(call, text)
    if kind == "raw" or not text.startswith("@"):
        return text.encode()
    data = await read_input(call, text[1:])
    if kind == "d":
        return data.translate(None, b"\r\n\0")
    return data


async def _urlencoded(call: CommandStream, text: str) -> bytes:
    """Encode a `--data-urlencode` value: text, =text, name=text, @file, or name@file."""
    mark = next((c for c in text if c in "=@"), "")
    name, _, content = text.partition(mark) if mark else ("", "", text)
    data = await read_input(call, content) if mark == "@" else content.encode()
    encoded = quote(data, safe="").encode()
    return name.encode() + b"=" + encoded if name else encoded


async def _multipart(call: CommandStream, forms: list[tuple[str, str]]) -> CurlBody:
    boundary = f"------------------------{secrets.token_hex(11)}"
    lines: list[bytes] = []
    for kind, form in forms:
        name, mark, value = form.partition("=")
        if not mark:
            raise FetchFailed(2, f"Illegally formatted input field: {form}")
        lines += [f"--{boundary}".encode(), *await _part(call, name, value, kind == "form")]
    lines += [f"--{boundary}--".encode(), b""]
    return CurlBody(
        data=b"\r\n".join(lines), content_type=f"multipart/form-data; boundary={boundary}"
    )


async def _part(call: CommandStream, name: str, value: str, special: bool) -> list[bytes]:
    disposition = f'Content-Disposition: form-data; name="{_quoted(name)}"'
    if not special:
        return [disposition.encode(), b"", value.encode()]
    value, *rest = value.split(";") if value[:1] in "@<" else [value]
    attributes = dict(item.strip().partition("=")[::2] for item in rest)
    kind = attributes.get("type")
    if value.startswith("@"):
        filename = attributes.get("filename", posixpath.basename(value[1:])).strip('"')
        disposition += f'; filename="{_quoted(filename)}"'
        kind = kind or mimetypes.guess_type(filename)[0] or "application/octet-stream"
    data = await read_input(call, value[1:]) if value[:1] in ("@", "<") else value.encode()
    head = [disposition.encode()] + ([f"Content-Type: {kind}".encode()] if kind else [])
    return [*head, b"", data]


def _quoted(text: str) -> str:
    return text.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
