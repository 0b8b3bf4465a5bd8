"""Options of an MCP server."""

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
    """An MCP server, by its `command` (stdio) or its `url` (streamable HTTP).

    Attributes:
        name: Prefix of its tools, which are named `name__tool`.
        command: Command of a server that speaks MCP on stdin and stdout.
        url: URL of a server that speaks MCP over streamable HTTP.
        env: Environment variables of the command.
        cwd: Working directory of the command.
        in_sandbox: Run the command in the agent's sandbox.
        headers: Headers of each request to `url`.
        token: Bearer token, or a function that returns one. The function is called for each
            request, and once more if the server refuses the token.
        tools: Patterns of the tools to include, such as `read_*`, by default all.
        timeout: Seconds for a call.
        connect_timeout: Seconds for the handshake and for listing the tools.
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
                raise self._wrong(option, f"It is an option of {other}=.")
        if self.url is not None and urlsplit(self.url).scheme not in ("http", "https"):
            raise self._wrong("url", "Pass an http:// or https:// address.")
        if self.command is not None and not self.argv:
            raise self._wrong("command", "Pass a command such as 'uvx mcp-server-git'.")
        for option in ("timeout", "connect_timeout"):
            if not getattr(self, option) > 0:
                raise self._wrong(option, "Pass a number of seconds above 0.")
        if isinstance(self.tools, str):
            raise self._wrong("tools", "Pass a list of names.")
        check_env(self.env)

    @property
    def argv(self) -> list[str]:
        """The command as a list of arguments."""
        if isinstance(self.command, str):
            try:
                return shlex.split(self.command)
            except ValueError as error:
                raise self._wrong("command", f"It is not valid shell syntax: {error}.") from error
        return [str(word) for word in self.command or ()]

    def includes(self, tool: str) -> bool:
        """Return True if the option `tools` includes this tool."""
        if self.tools is None:
            return True
        return any(fnmatch.fnmatchcase(tool, pattern) for pattern in self.tools)

    def _wrong(self, option: str, hint: str) -> InvalidOption:
        # Secrets must not appear in errors.
        hidden = option in ("headers", "token", "env")
        value = "..." if hidden else repr(getattr(self, option))
        return InvalidOption(
            f"the MCP server {self.name!r} cannot have {option}={value}.",
            hint=hint,
            option=option,
            value=value,
        )
