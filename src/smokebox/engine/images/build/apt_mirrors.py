"""The apt settings of this host for builds: mirrors of its distribution, their logins, and a proxy.

A step asks for the archives of its distribution as its image names them, such as
`http://debian.example.com/debian`. An egress handler sends that to the mirror of this host, with
the login, so that neither enters the sandbox. Which hosts a step reaches is decided before, by the
build's policy.
"""

from __future__ import annotations

import base64
import glob
import os
import re
import shlex
import subprocess
import urllib.parse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smokebox.egress.builtin_handlers import BuiltinHandler
from smokebox.egress.message import Request
from smokebox.egress.outbound import OutboundCall

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from smokebox.egress.handler import HandlerContext
    from smokebox.egress.message import Response

_PROXY_SECONDS = 5.0
_PROXY = "Acquire::http::Proxy"


# Paths of the main archive and of security updates, on any server of a distribution.
_ARCHIVES = {"debian": ("/debian", "/debian-security"), "ubuntu": ("/ubuntu", "/ubuntu")}
_CONTENT = ("/dists/", "/pool/")


@dataclass(frozen=True, slots=True, kw_only=True)
class AptMirror:
    """Where the requests for an archive go: a URL, with the value of an Authorization header."""

    path: str
    url: str
    authorization: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AptSettings:
    """The apt settings of a host. `proxy` is the URL of an HTTP proxy, with its login."""

    mirrors: tuple[AptMirror, ...] = ()
    proxy: str = field(default="", repr=False)

    def handler(self, *, logins: bool) -> AptHandler | None:
        """Return a handler for servers of archives; None if their requests go nowhere else."""
        mirrors, proxy = self.mirrors, self.proxy
        if not logins:
            mirrors = tuple(replace(one, authorization="") for one in mirrors)
            scheme, _, rest = proxy.partition("://")
            proxy = proxy and f"{scheme}://{rest.rpartition('@')[2]}"
        return AptHandler(mirrors, proxy) if mirrors or proxy else None


class AptHandler(BuiltinHandler):
    """Sends the requests for archives to the mirror, and through the proxy."""

    def __init__(self, mirrors: Sequence[AptMirror], proxy: str) -> None:
        super().__init__("apt_mirror")
        # The longest path decides.
        self._mirrors = sorted(mirrors, key=lambda one: -len(one.path))
        self._proxy = proxy

    async def __call__(
        self, request: Request, env: Any, context: HandlerContext
    ) -> Request | Response:
        """Send a request."""
        # In the engine there is no other one.
        assert isinstance(context, OutboundCall)
        url = urllib.parse.urlsplit(request.url)
        target, to = request, f"{url.scheme}://{url.netloc}"
        for mirror in self._mirrors:
            rest_of_path = url.path.removeprefix(mirror.path)
            if url.path.startswith(mirror.path) and rest_of_path.startswith(_CONTENT):
                rest = url._replace(path=rest_of_path)
                target = Request(request.method, rest.geturl(), request.headers, request.body)
                if mirror.authorization:
                    target.headers["Authorization"] = mirror.authorization
                to = mirror.url
                break
        # A proxy would see only a tunnel of TLS.
        proxy = self._proxy if to.startswith("http://") else ""
        if target is request:
            return request
        return await context.forward(target, to=to, proxy=proxy)


def read_apt(root: str = "/") -> AptSettings:
    """Read the settings of a host, whose files are below `root`. Blocks."""
    release = _os_release(root)
    archives = _ARCHIVES.get(release.get("ID", ""))
    codename = release.get("VERSION_CODENAME", "")
    if archives is None or not codename:
        return AptSettings()
    logins, mirrors = _logins(root), list[AptMirror]()
    for url, suite in _sources(root):
        if suite.partition("-")[0] != codename:
            continue
        main, security = archives
        path = security if suite.endswith("-security") else main
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            continue
        plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
        login = _inline_login(parts) or _find_login(logins, parts)
        if path not in {one.path for one in mirrors}:
            mirrors.append(AptMirror(path=path, url=plain, authorization=login))
    return AptSettings(mirrors=tuple(mirrors), proxy=_proxy())


def _os_release(root: str) -> dict[str, str]:
    fields = {}
    for line in _read(os.path.join(root, "etc/os-release")).splitlines():
        name, equals, value = line.partition("=")
        if equals:
            fields[name] = " ".join(shlex.split(value))
    return fields


def _sources(root: str) -> Iterator[tuple[str, str]]:
    """Yield the URLs and suites of the sources, in both formats."""
    folder = os.path.join(root, "etc/apt")
    for path in (f"{folder}/sources.list", *sorted(glob.glob(f"{folder}/sources.list.d/*.list"))):
        for line in _read(path).splitlines():
            found = re.match(r"\s*deb\s+(?:\[[^]]*\]\s*)?(\S+)\s+(\S+)", line)
            if found:
                yield found[1], found[2]
    for path in sorted(glob.glob(f"{folder}/sources.list.d/*.sources")):
        text = re.sub(r"^#.*\n", "", _read(path), flags=re.MULTILINE)
        for stanza in re.split(r"\n\s*\n", text):
            unfolded = re.sub(r"\n[ \t]+", " ", stanza)
            pairs = (line.partition(":") for line in unfolded.splitlines())
            fields = {name.strip().lower(): value.split() for name, _, value in pairs}
            if "deb" in fields.get("types", ()) and fields.get("enabled", ["yes"]) != ["no"]:
                for url in fields.get("uris", ()):
                    yield from ((url, suite) for suite in fields.get("suites", ()))


def _logins(root: str) -> list[tuple[str, str]]:
    """Return the places of auth.conf with the values of their headers."""
    folder, found = os.path.join(root, "etc/apt"), list[tuple[str, str]]()
    for path in (f"{folder}/auth.conf", *sorted(glob.glob(f"{folder}/auth.conf.d/*.conf"))):
        text = re.sub(r"#.*", "", _read(path))
        for entry in re.split(r"(?:^|\s)machine\s+", text)[1:]:
            words = entry.split()
            fields = dict(zip(words[1::2], words[2::2], strict=False))
            if "login" in fields and "password" in fields:
                found.append((words[0], _basic(fields["login"], fields["password"])))
    return found


def _find_login(logins: list[tuple[str, str]], url: urllib.parse.SplitResult) -> str:
    """Return the header for a URL. As apt does, only an entry that says so is for plain HTTP."""
    place = f"{url.hostname}{f':{url.port}' if url.port else ''}{url.path}"
    for machine, value in logins:
        scheme, separator, rest = machine.rpartition("://")
        if url.scheme == (scheme if separator else "https") and place.startswith(rest):
            return value
    return ""


def _inline_login(url: urllib.parse.SplitResult) -> str:
    if url.username is None:
        return ""
    return _basic(urllib.parse.unquote(url.username), urllib.parse.unquote(url.password or ""))


def _basic(login: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{login}:{password}".encode()).decode()


def _proxy() -> str:
    """Return the proxy that apt is configured for, whose configuration has many files."""
    try:
        done = subprocess.run(
            ["apt-config", "shell", "url", _PROXY],
            capture_output=True,
            text=True,
            timeout=_PROXY_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    url = "".join(shlex.split(done.stdout)).removeprefix("url=")
    return url if urllib.parse.urlsplit(url).scheme == "http" else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
