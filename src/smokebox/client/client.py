"""Servers, and the sandboxes on them: the default one by `get_sandbox`, others by `connect`."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, Literal, Self, TypeVar, Unpack, overload

import msgspec

from smokebox.client.backups import Backups
from smokebox.client.bindings import Binding
from smokebox.client.connection import Address
from smokebox.client.handle import repeat_key
from smokebox.client.keys import Keys
from smokebox.client.sandbox import Sandbox
from smokebox.client.settings import Asked, SandboxSettings, parse_settings
from smokebox.client.transport import Transport
from smokebox.errors import InvalidOption
from smokebox.types import SandboxInfo
from smokebox.wire import answers
from smokebox.wire.place import default_home, socket_path
from smokebox.wire.requests import CreateSandbox

if TYPE_CHECKING:
    from collections.abc import Mapping

S = TypeVar("S", bound=Sandbox)

URL = "SMOKEBOX_URL"
API_KEY = "SMOKEBOX_API_KEY"


class Client:
    """One server. Made by `connect`; nothing is asked before the first call."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.keys = Keys(transport)
        self.backups = Backups(transport)

    @property
    def url(self) -> str:
        """Where the server is."""
        return str(self._transport.address)

    @overload
    def sandbox(self, id: str, /, **settings: Unpack[SandboxSettings]) -> Sandbox: ...

    @overload
    def sandbox(self, kind: type[S], id: str, /, **settings: Unpack[SandboxSettings]) -> S: ...

    @overload
    def sandbox(
        self, kind: Binding, id: str, /, **settings: Unpack[SandboxSettings]
    ) -> Sandbox: ...

    def sandbox(
        self,
        kind: str | type[Sandbox] | Binding,
        id: str | None = None,
        /,
        **settings: Unpack[SandboxSettings],
    ) -> Sandbox:
        """A sandbox of this server by its id; see `get_sandbox`."""
        return self._sandbox(kind, id, settings)

    @overload
    async def create(
        self, kind: None = None, /, **settings: Unpack[SandboxSettings]
    ) -> Sandbox: ...

    @overload
    async def create(self, kind: type[S], /, **settings: Unpack[SandboxSettings]) -> S: ...

    @overload
    async def create(self, kind: Binding, /, **settings: Unpack[SandboxSettings]) -> Sandbox: ...

    async def create(
        self,
        kind: type[Sandbox] | Binding | None = None,
        /,
        **settings: Unpack[SandboxSettings],
    ) -> Sandbox:
        """A sandbox under a random id, which is destroyed at the end of its `async with`."""
        form, asked = _asked("create()", kind or Sandbox, settings)
        body = msgspec.convert(msgspec.to_builtins(asked.settings), CreateSandbox)
        info = await self._transport.ask(
            SandboxInfo, "POST", "/sandboxes", body=body, timeout=None, repeat_key=repeat_key()
        )
        sandbox = form(info.id, self._transport, asked.settings, asked.handlers)
        sandbox.made(info)
        return sandbox

    async def list(
        self,
        *,
        status: Literal["idle", "active"] | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str = "",
    ) -> list[SandboxInfo]:
        """The sandboxes that are there, by id: with that status, all those labels, that prefix."""
        query = {
            "status": status,
            "prefix": prefix,
            "label": [f"{name}={value}" for name, value in (labels or {}).items()],
        }
        found = await self._transport.ask(answers.Sandboxes, "GET", "/sandboxes", query=query)
        return found.sandboxes

    async def health(self) -> answers.Health:
        """Whether the server lives, and its version."""
        return await self._transport.ask(answers.Health, "GET", "/health")

    async def aclose(self) -> None:
        """Close the connections of this event loop. Nobody has to: it does so at its end."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Client of {self.url}>"

    def _sandbox(self, kind: object, id: str | None, settings: Mapping[str, object]) -> Sandbox:
        if isinstance(kind, str) and id is None:
            return self._sandbox(Sandbox, kind, settings)
        form, asked = _asked("get_sandbox()", kind, settings)
        if id is None:
            raise InvalidOption(
                f"{form.__name__} is a kind of sandbox, and needs an id.",
                hint='Pass get_sandbox(Kind, "id").',
                option="id",
            )
        return form(id, self._transport, asked.settings, asked.handlers)


def connect(url: str | None = None, api_key: str | None = None) -> Client:
    """A server: http://host:port, https://host, or unix:/path/to/server.sock.

    Without a url it is that of SMOKEBOX_URL, else this user's own, which is started in the
    background when nobody listens. Without a key that of SMOKEBOX_API_KEY is sent.
    """
    url, key = url or os.environ.get(URL), api_key or os.environ.get(API_KEY)
    if url:
        return Client(Transport(Address.parse(url), key))
    return _local(default_home())


def default_client() -> Client:
    """The server that the environment names; the same object while that stays as it is."""
    url, key, home = os.environ.get(URL), os.environ.get(API_KEY), default_home()
    with _lock:
        found = _defaults.get((url, key, home))
        if found is None:
            found = _defaults[(url, key, home)] = connect()
    return found


@overload
def get_sandbox(id: str, /, **settings: Unpack[SandboxSettings]) -> Sandbox: ...


@overload
def get_sandbox(kind: type[S], id: str, /, **settings: Unpack[SandboxSettings]) -> S: ...


@overload
def get_sandbox(kind: Binding, id: str, /, **settings: Unpack[SandboxSettings]) -> Sandbox: ...


def get_sandbox(
    kind: str | type[Sandbox] | Binding,
    id: str | None = None,
    /,
    **settings: Unpack[SandboxSettings],
) -> Sandbox:
    """The Linux sandbox of an id, made by its first call if there is none.

    A subclass of `Sandbox` or a binding (`env.Name`) before the id says how it is to be, and
    keywords say so over both; see `SandboxSettings`. Nothing is asked of the server yet.
    """
    return default_client()._sandbox(kind, id, settings)


async def list_sandboxes(
    *,
    status: Literal["idle", "active"] | None = None,
    labels: Mapping[str, str] | None = None,
    prefix: str = "",
) -> list[SandboxInfo]:
    """The sandboxes of the default server; see `Client.list`."""
    return await default_client().list(status=status, labels=labels, prefix=prefix)


_lock = threading.Lock()
_defaults: dict[tuple[str | None, str | None, str], Client] = {}


def _local(home: str) -> Client:
    async def revive() -> None:
        # Most find that it is there.
        from smokebox.client import background

        await asyncio.to_thread(background.start, home)

    return Client(
        Transport(Address(base="http://localhost", socket=socket_path(home)), revive=revive)
    )


def _asked(where: str, kind: object, given: Mapping[str, object]) -> tuple[type[Sandbox], Asked]:
    """The class of a handle, and the settings of a kind of sandboxes with those given."""
    asked = parse_settings(where, given)
    if isinstance(kind, Binding):
        return Sandbox, asked.over(Asked(settings=kind.settings))
    if isinstance(kind, type) and issubclass(kind, Sandbox):
        own = parse_settings(f"class {kind.__name__}", kind.declared)
        return kind, asked.over(own)
    raise InvalidOption(
        f"a kind of sandbox is a subclass of Sandbox or a binding, not {kind!r}.",
        hint='Pass get_sandbox("id"), get_sandbox(Kind, "id") or get_sandbox(env.Name, "id").',
        option="kind",
        value=repr(kind),
    )
