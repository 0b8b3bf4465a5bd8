"""Which MCP server an agent uses, and how it is reached."""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import urlsplit

from smokebox.errors import InvalidOption
from smokebox.options import check_env

Token: TypeAlias = str | Callable[[], str | Awaitable[str]]

DEFAULT_TIMEOUT = 60.0
DEFAULT_CONNECT_TIMEOUT = 30.0
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPServer:
    """A server of tools: a `command` that speaks MCP on its standard input and output, or the
    `url` of one that speaks it over streamable HTTP. Its tools are called `name__tool`.

    With `in_sandbox` the command runs where the agent works. `headers` go with each request;
    `token` is a bearer token, or a function that gives one, asked for each request and once
    more when the server refuses it. `tools` says which of its tools to take, where `*` stands
    for anything. `timeout` is for a call, `connect_timeout` for the first contact.
    """

    name: str
    command: str | Sequence[str] | None = None
    url: str | None = None
    env: Mapping[str, str] | None = field(default=None, repr=False)
    cwd: str | None = None
    in_sandbox: bool = False
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    token: Token | None = field(default=None, repr=False)
    tools: Sequence[str] | None = None
    timeout: float = DEFAULT_TIMEOUT
    connect_timeout: float = DEFAULT_CONNECT_TIMEOUT

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise self._wrong("name", "Use at most 32 letters, digits, underscores and hyphens.")
        if (self.command is None) == (self.url is None):
            raise self._wrong("command", "Pass either command= or url=, not both.")
        for option in ("env", "cwd", "in_sandbox") if self.url else ("headers", "token"):
            if getattr(self, option):
                other = "command" if self.url else "url"
                raise self._wrong(option, f"It belongs to {other}=.")
        if self.url is not None and urlsplit(self.url).scheme not in ("http", "https"):
            raise self._wrong("url", "Pass an http:// or https:// address.")
        if self.command is not None and not self.words:
            raise self._wrong("command", "Pass a command such as 'uvx mcp-server-git'.")
        for option in ("timeout", "connect_timeout"):
            if not getattr(self, option) > 0:
                raise self._wrong(option, "Pass seconds, more than 0.")
        if isinstance(self.tools, str):
            raise self._wrong("tools", "Pass a list of names.")
        check_env(self.env)

    @property
    def words(self) -> list[str]:
        """The command as words."""
        if isinstance(self.command, str):
            try:
                return shlex.split(self.command)
            except ValueError as error:
                raise self._wrong("command", f"A shell could not read it: {error}.") from error
        return [str(word) for word in self.command or ()]

    def takes(self, tool: str) -> bool:
        """Whether a tool of the server is one that the agent gets."""
        if self.tools is None:
            return True
        return any(fnmatch.fnmatchcase(tool, pattern) for pattern in self.tools)

    def _wrong(self, option: str, hint: str) -> InvalidOption:
        # A token or a header is a secret, and an error is read by many.
        hidden = option in ("headers", "token", "env")
        value = "..." if hidden else repr(getattr(self, option))
        return InvalidOption(
            f"the MCP server {self.name!r} cannot have {option}={value}.",
            hint=hint,
            option=option,
            value=value,
        )
