"""Where previews are: below which names, at which URLs, and told from all other requests."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from smokebox.errors import InvalidOption
from smokebox.server.settings import LOOPBACK
from smokebox.wire.preview import LONGEST_LABEL, PATH, Target, parse_label, parse_path

if TYPE_CHECKING:
    from smokebox.server.settings import ServerSettings

Kind = Literal["preview", "other", "partial"]

LONGEST_HEAD = 1 << 16
_HOST = re.compile(rb"\r\n[Hh][Oo][Ss][Tt]:[ \t]*([^\r\n]*)")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_LOCAL = ".localhost"
_EVERYWHERE = ("0.0.0.0", "::", "")
_PATH = PATH.encode()


class Sites:
    """The names below which each label is a preview: `localhost`, and one that was set."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.proto = b"http"
        self._base = None
        self._suffixes: tuple[str, ...] = (_LOCAL,)
        if settings.preview_url is not None:
            parts = _parse(settings.preview_url)
            self._base, self.proto = settings.preview_url.rstrip("/"), parts[0].encode()
            self._suffixes = (_LOCAL, f".{parts[1]}")

    def is_preview(self, host: bytes) -> bool:
        """Whether a name is below one of ours, and so never the API's."""
        return name_of(host).endswith(self._suffixes)

    def proto_of(self, host: bytes) -> bytes:
        """By which protocol a name of ours is asked, as far as who asks can tell."""
        return b"http" if name_of(host).endswith(_LOCAL) else self.proto

    def target_of(self, host: bytes, path: bytes) -> Target | None:
        """What a request asks for; None for what no preview is called."""
        name = name_of(host)
        for suffix in self._suffixes:
            if name.endswith(suffix):
                return parse_label(name.removesuffix(suffix))
        return parse_path(path.decode("latin-1"))

    def kind_of(self, data: bytes) -> Kind:
        """What the bytes are that a request begins with."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return "partial" if len(data) < LONGEST_HEAD else "other"
        start = data.find(b" ", 0, end) + 1
        if data.startswith(_PATH, start):
            return "preview"
        found = _HOST.search(data, 0, end)
        return "preview" if found is not None and self.is_preview(found[1]) else "other"

    def url(self, target: Target, *, port: int | None, asked_by: str | None) -> str:
        """The URL of a preview, for who asked by that name (None for the unix socket).

        `port` is where this server listens. Raises `InvalidOption` for a target that has no
        name in DNS.
        """
        if self._base is not None:
            scheme, _, rest = self._base.partition("://")
            return f"{scheme}://{_label(target)}.{rest}/"
        host = self._settings.host
        if asked_by is None or name_of(asked_by.encode()) in LOOPBACK:
            if host is None or host in LOOPBACK or host in _EVERYWHERE:
                return f"http://{_label(target)}.localhost:{port}/"
            asked_by = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return f"http://{asked_by}{target.path}"


def name_of(host: bytes) -> str:
    """The name in a header Host, without its port."""
    text = host.strip().decode("latin-1").lower()
    name = text.partition("]")[0].lstrip("[") if text.startswith("[") else text.partition(":")[0]
    return name.removesuffix(".")


def _label(target: Target) -> str:
    if len(target.label) > LONGEST_LABEL:
        raise InvalidOption(
            f"the name {target.label} of a preview has {len(target.label)} characters, and DNS "
            f"has room for {LONGEST_LABEL}.",
            hint="Use a sandbox with a shorter id, or a URL that does not expire.",
            option="expires_in",
        )
    return target.label


def _parse(url: str) -> tuple[str, str]:
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
            f"{url!r} is not where previews can be.",
            hint="Pass a URL with nothing but a name, such as https://preview.example.com, where "
            "all names below that name lead to this server.",
            option="preview_url",
            value=url,
        )
    return parts.scheme, name
