"""Host names, paths and URLs of previews, and which requests are for one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from smokebox.errors import InvalidOption
from smokebox.foundation.http1.head import MAX_HEAD
from smokebox.server.settings import LOOPBACK
from smokebox.wire.preview import (
    LONGEST_LABEL,
    PATH,
    TOKEN_PARAMETER,
    PreviewTarget,
    parse_label,
    parse_path,
)

if TYPE_CHECKING:
    from smokebox.server.settings import ServerSettings

RequestKind = Literal["preview", "other", "partial"]

_HOST = re.compile(rb"\r\n[Hh][Oo][Ss][Tt]:[ \t]*([^\r\n]*)")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_LOCALHOST = ".localhost"
_ALL_ADDRESSES = ("0.0.0.0", "::", "")
_PATH = PATH.encode()


class PreviewNames:
    """The domains whose subdomains are previews: `localhost`, and the configured one."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._base: str | None = None
        self._proto = "http"
        self._suffixes: tuple[str, ...] = (_LOCALHOST,)
        if settings.preview_url is not None:
            self._base = settings.preview_url.rstrip("/")
            self._proto, name = _parse(settings.preview_url)
            self._suffixes = (_LOCALHOST, f".{name}")

    def is_preview(self, host: str) -> bool:
        """Tell whether a Host header names a preview, and so never the API."""
        return host_name(host).endswith(self._suffixes)

    def proto_of(self, host: str) -> str:
        """Return the scheme of the URL that a client used to reach that host."""
        return "http" if host_name(host).endswith(_LOCALHOST) else self._proto

    def parse(self, host: str, path: str) -> PreviewTarget | None:
        """Return the preview that a request is for; None if it does not name one."""
        name = host_name(host)
        for suffix in self._suffixes:
            if name.endswith(suffix):
                return parse_label(name.removesuffix(suffix))
        return parse_path(path)

    def request_kind(self, data: bytes | bytearray, scanned: int = 0) -> RequestKind:
        """Classify the first bytes of a request; "partial" until its whole head is there.

        Args:
            scanned: How many bytes of them were partial.
        """
        end = data.find(b"\r\n\r\n", max(0, scanned - 3))
        if end < 0:
            return "partial" if len(data) < MAX_HEAD else "other"
        start = data.find(b" ", 0, end) + 1
        if data.startswith(_PATH, start):
            return "preview"
        found = _HOST.search(data, 0, end)
        is_preview = found is not None and self.is_preview(found[1].decode("latin-1"))
        return "preview" if is_preview else "other"

    def url(self, target: PreviewTarget, *, port: int | None, requested_host: str | None) -> str:
        """Return the URL of a preview for a client of the API.

        Args:
            port: Port where this server listens for previews.
            requested_host: Host header of the client; None on the unix socket.

        Raises:
            InvalidOption: The name is too long for DNS.
        """
        if self._base is not None:
            scheme, _, rest = self._base.partition("://")
            return f"{scheme}://{_label(target)}.{rest}/{_query(target)}"
        host = self._settings.host
        if requested_host is None or host_name(requested_host) in LOOPBACK:
            if host is None or host in LOOPBACK or host in _ALL_ADDRESSES:
                return f"http://{_label(target)}.localhost:{port}/{_query(target)}"
            requested_host = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return f"http://{requested_host}{target.path}"


def host_name(host: str) -> str:
    """Return the name in a Host header, in lower case and without the port."""
    text = host.strip().lower()
    name = text.partition("]")[0].lstrip("[") if text.startswith("[") else text.partition(":")[0]
    return name.removesuffix(".")


def _query(target: PreviewTarget) -> str:
    return f"?{TOKEN_PARAMETER}={target.token}"


def _label(target: PreviewTarget) -> str:
    # A port that an earlier version exposed with a short token may have too long a name.
    if len(target.label) > LONGEST_LABEL:
        raise InvalidOption(
            f"the preview host name {target.label} has {len(target.label)} characters, and DNS "
            f"allows {LONGEST_LABEL}.",
            hint="Use a sandbox with a shorter id.",
            option="port",
            value=target.port,
        )
    return target.label


def _parse(url: str) -> tuple[str, str]:
    """Return the scheme and the name of `preview_url`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    name = (parts.hostname or "").lower()
    whole = f"{parts.scheme}://{name}" + (f":{port}" if port else "")
    if (
        parts.scheme not in ("http", "https")
        or not _NAME.fullmatch(name)
        or name.replace(".", "").isdigit()
        or url.lower().rstrip("/") != whole
    ):
        raise InvalidOption(
            f"{url!r} cannot be the base URL of previews.",
            hint="Pass a URL with only a host name, such as https://preview.example.com, whose "
            "subdomains all lead to this server.",
            option="preview_url",
            value=url,
        )
    return parts.scheme, name
