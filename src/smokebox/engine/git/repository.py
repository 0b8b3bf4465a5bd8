"""Options of a clone, parsed strictly: the URL, credentials, a branch and a depth."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from typing import NoReturn
from urllib.parse import unquote

from smokebox.egress.urls import Url, parse_url
from smokebox.engine.record.rows import DEFAULT_CWD
from smokebox.errors import InvalidOption

# User name that git hosts accept with a token.
TOKEN_USER = "x-access-token"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}(://|::)")
_USERINFO = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:%-]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# As in `git check-ref-format`: control characters, space and the syntax of revisions.
_INVALID_IN_BRANCH = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//")
_MAX_BRANCH = 250
_MAX_NAME = 255
_HIDDEN = "[hidden]"


@dataclass(frozen=True, slots=True, kw_only=True)
class GitCredentials:
    """Credentials for the host. No text that is shown or stored may contain them."""

    username: str = field(repr=False)
    password: str = field(repr=False)

    @property
    def header(self) -> str:
        """Value of the Authorization header."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()

    def redact(self, text: str) -> str:
        """Return `text` without the secret, plain or encoded."""
        # A user name without a password is a token.
        for secret in (self.header.removeprefix("Basic "), self.password or self.username):
            text = text.replace(secret, _HIDDEN)
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository on an HTTP server; `url` has no credentials in it."""

    url: Url
    credentials: GitCredentials | None

    @property
    def name(self) -> str:
        """Name that git gives the directory of a clone; empty if the URL has none."""
        last = unquote(self.url.path.rstrip("/").rpartition("/")[2]).removesuffix(".git")
        usable = last not in ("", ".", "..") and "/" not in last and not _CONTROL.search(last)
        return last if usable and len(last.encode()) <= _MAX_NAME else ""

    def redact(self, text: str) -> str:
        """Return `text` without the secret."""
        return self.credentials.redact(text) if self.credentials is not None else text


def parse_repository(
    url: str, *, username: str | None = None, password: str | None = None
) -> Repository:
    """Parse a URL with or without credentials. No error that it raises contains them."""
    if not isinstance(url, str):
        _refuse_url(f"a {type(url).__name__}")
    scheme = _SCHEME.match(url)
    if scheme is None:
        _refuse_url("one that begins with '-'" if url.startswith("-") else "a path or a host")
    if scheme[0].lower() not in ("https://", "http://"):
        _refuse_url(scheme[0])
    rest = url[scheme.end() :]
    end = min((rest.find(mark) for mark in "/?#" if mark in rest), default=len(rest))
    userinfo, at, host = rest[:end].rpartition("@")
    if not _USERINFO.fullmatch(userinfo):
        raise InvalidOption(
            "the credentials in the URL have characters that programs read differently.",
            hint="Omit them in the URL, and pass username= and password=.",
            option="url",
        )
    if "?" in rest or "#" in rest:
        raise InvalidOption(
            "the URL of a repository has no query and no fragment.",
            hint="Omit what follows '?' or '#'; pass a branch as branch=.",
            option="url",
        )
    clean = parse_url(f"{scheme[0]}{host}{rest[end:]}")
    return Repository(
        url=clean, credentials=_credentials(userinfo if at else "", username, password)
    )


def default_target(repository: Repository) -> str:
    """Return the default directory of a clone."""
    if not repository.name:
        raise InvalidOption(
            "the URL has no part that can be the name of a directory.",
            hint="Pass target='/workspace/project'.",
            option="target",
        )
    return f"{DEFAULT_CWD}/{repository.name}"


def check_branch(branch: str) -> str:
    """Return `branch`, or raise unless git allows it as a name of branches and tags."""
    valid = isinstance(branch, str) and 0 < len(branch) <= _MAX_BRANCH
    if valid and not _INVALID_IN_BRANCH.search(branch) and branch != "@" and _is_text(branch):
        parts = branch.split("/")
        ends_well = not branch.endswith(".") and not branch.startswith("-")
        if ends_well and not any(_is_bad_part(part) for part in parts):
            return branch
    raise InvalidOption(
        f"{branch!r:.80} is not a valid name of a branch or tag.",
        hint="Pass it as `git branch` shows it, such as branch='main'.",
        option="branch",
        value=branch,
    )


def check_depth(depth: int) -> int:
    """Return `depth`, or raise unless it is a positive number of commits."""
    if isinstance(depth, bool) or not isinstance(depth, int) or not 0 < depth < 1 << 31:
        raise InvalidOption(
            f"depth is a positive number of commits, not {depth!r:.80}.",
            hint="Pass depth=1 for the last commit only, or omit it for all commits.",
            option="depth",
            value=depth,
        )
    return depth


def _is_bad_part(part: str) -> bool:
    return not part or part.startswith(".") or part.endswith(".lock")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _credentials(
    userinfo: str, username: str | None, password: str | None
) -> GitCredentials | None:
    if userinfo and (username is not None or password is not None):
        raise InvalidOption(
            "credentials are both in the URL and in username= or password=.",
            hint="Omit them in the URL.",
            option="url",
        )
    if userinfo:
        username, _, password = map(unquote, userinfo.partition(":"))
    for name, value in (("username", username), ("password", password)):
        # The value may be a secret, so it is not in the message.
        if value is not None and (
            not isinstance(value, str) or _CONTROL.search(value) or not _is_text(value)
        ):
            raise InvalidOption(
                f"{name} is text without line breaks and other control characters.",
                hint="Strip the line break at the end of the secret.",
                option=name,
            )
    if username is not None and ":" in username:
        raise InvalidOption(
            "username cannot contain a ':'.",
            hint="Pass the token as password=, and omit username.",
            option="username",
        )
    if not username and not password:
        return None
    return GitCredentials(username=username or TOKEN_USER, password=password or "")


def _refuse_url(kind: str) -> NoReturn:
    raise InvalidOption(
        f"git_checkout() takes https:// and http:// URLs, not {kind}.",
        hint="Pass for example 'https://github.com/owner/name'; a private repository also "
        "takes password=, which is a token.",
        option="url",
    )
