"""Clients of servers: `get_sandbox` uses the default one, `connect` any other."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, Literal, Self, TypeVar, Unpack, overload

import msgspec

from smokebox.client.address import Address
from smokebox.client.bindings import Binding
from smokebox.client.image_builds import ImageBuilds
from smokebox.client.images import Images, with_own_credentials
from smokebox.client.sandbox import Sandbox, find_class
from smokebox.client.sandbox_connection import with_server_image
from smokebox.client.server_resources import Backups, Keys, Snapshots
from smokebox.client.settings import (
    ParsedSettings,
    SandboxSettings,
    parse_settings,
    set_fields,
    with_declared,
)
from smokebox.client.transport import Transport
from smokebox.errors import InvalidOption
from smokebox.foundation.endpoint import default_home, socket_path
from smokebox.foundation.ids import new_global_id
from smokebox.types import SandboxInfo
from smokebox.wire import responses
from smokebox.wire.requests import CreateSandbox

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.client.transport import ImageProgress

S = TypeVar("S", bound=Sandbox)

URL = "SMOKEBOX_URL"
API_KEY = "SMOKEBOX_API_KEY"


class Client:
    """One server; `connect` returns it. Sends nothing before the first call.

    `keys` manages its API keys, `images` the images that its sandboxes start from, `builds` builds
    some, and `backups` manages the backups of all sandboxes.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.keys = Keys(transport)
        self.backups = Backups(transport)
        self.images = Images(transport)
        self.builds = ImageBuilds(transport)
        self.snapshots = Snapshots(transport)

    @property
    def url(self) -> str:
        """Address of the server."""
        return str(self._transport.address)

    def watch_images(self, show: ImageProgress) -> None:
        """Call a function with the progress of images that sandboxes need.

        Args:
            show: Gets a `BuildEvent` for an image that is built, and a `LayerProgress` for one that
                is loaded from files.
        """
        self._transport.image_progress = show

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
        """Return a sandbox of this server by its id; see `get_sandbox`.

        Args:
            kind: The id alone, or a subclass of `Sandbox` or a binding before the id.
            id: Id of the sandbox: letters, digits and hyphens, at most 63.
            **settings: Settings that override those of `kind`; see `SandboxSettings`.

        Raises:
            InvalidOption: A setting is unknown or has a wrong type, or the id is invalid.
        """
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
        **options: Unpack[SandboxSettings],
    ) -> Sandbox:
        """Create a sandbox with a random id, destroyed at the end of its `async with` block.

        Args:
            kind: A subclass of `Sandbox` or a binding.
            **options: Settings that override those of `kind`; see `SandboxSettings`.

        Raises:
            InvalidOption: A setting is unknown or invalid.
            ServiceUnavailable: The server cannot be reached.
        """
        cls, parsed = _resolve("create()", kind or Sandbox, options)
        settings = await with_server_image(self._transport, parsed.settings)
        body = msgspec.convert(msgspec.to_builtins(settings), CreateSandbox)

        async def send() -> SandboxInfo:
            return await self._transport.request(
                SandboxInfo,
                "POST",
                "/sandboxes",
                body=body,
                idempotency_key=new_global_id(),
                timeout=None,
            )

        info = await with_own_credentials(self._transport, body.image, send)
        sandbox = cls(info.id, self._transport, parsed.settings, parsed.handlers)
        sandbox._connection.set_created(info)
        sandbox._destroy_on_close = True
        return sandbox

    async def list(
        self,
        *,
        status: Literal["idle", "active"] | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str = "",
    ) -> list[SandboxInfo]:
        """Return the sandboxes of the server, sorted by id.

        Args:
            status: Only sleeping ("idle") or running ("active") ones.
            labels: Only those that have all these labels.
            prefix: Only those whose ids start with this.
        """
        query = {
            "status": status,
            "prefix": prefix,
            "label": [f"{name}={value}" for name, value in (labels or {}).items()],
        }
        response = await self._transport.request(
            responses.Sandboxes, "GET", "/sandboxes", query=query
        )
        return response.sandboxes

    async def health(self) -> responses.Health:
        """Return the version and state of the server.

        Raises:
            ServiceUnavailable: It cannot be reached.
        """
        return await self._transport.request(responses.Health, "GET", "/health")

    async def aclose(self) -> None:
        """Close the connections of this event loop. They also close when the loop ends."""
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
        cls, parsed = _resolve("get_sandbox()", kind, settings)
        if id is None:
            raise InvalidOption(
                "get_sandbox() needs an id after the class or binding.",
                hint='Pass get_sandbox(Kind, "id").',
                option="id",
            )
        return cls(id, self._transport, parsed.settings, parsed.handlers)


def connect(url: str | None = None, api_key: str | None = None) -> Client:
    """Return a client of a server. Sends nothing before the first call.

    Args:
        url: http://host:port, https://host, or unix:/path/to/server.sock. By default that of
            SMOKEBOX_URL, else the user's own server, which is started in the background if it
            is not running.
        api_key: Key to send, by default that of SMOKEBOX_API_KEY.

    Raises:
        InvalidOption: The URL has another form.
    """
    url, key = url or os.environ.get(URL), api_key or os.environ.get(API_KEY)
    if url:
        return Client(Transport(Address.parse(url), key))
    return _local(default_home())


def default_client() -> Client:
    """Return the client of the server that the environment names, cached by its variables."""
    url, key, home = os.environ.get(URL), os.environ.get(API_KEY), default_home()
    with _lock:
        client = _defaults.get((url, key, home))
        if client is None:
            client = _defaults[(url, key, home)] = connect()
    return client


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
    """Return the Linux sandbox of an id. Its first call creates it if it does not exist.

    Args:
        kind: The id alone; or a subclass of `Sandbox` or a binding (`env.Name`), whose
            settings the sandbox gets, before the id.
        id: Id of the sandbox: letters, digits and hyphens, at most 63.
        **settings: Settings that override those of `kind`; see `SandboxSettings`.

    Raises:
        InvalidOption: A setting is unknown or has a wrong type, or the id is invalid.
    """
    return default_client()._sandbox(kind, id, settings)


async def list_sandboxes(
    *,
    status: Literal["idle", "active"] | None = None,
    labels: Mapping[str, str] | None = None,
    prefix: str = "",
) -> list[SandboxInfo]:
    """Return the sandboxes of the default server; see `Client.list` for the options."""
    return await default_client().list(status=status, labels=labels, prefix=prefix)


_lock = threading.Lock()
_defaults: dict[tuple[str | None, str | None, str], Client] = {}


def _local(home: str) -> Client:
    async def start_server() -> None:
        # Rarely needed, and slow to import.
        from smokebox.client import background

        await asyncio.to_thread(background.start, home)

    address = Address(base="http://localhost", socket=socket_path(home))
    return Client(Transport(address, start_server=start_server))


def _resolve(
    where: str, kind: object, options: Mapping[str, object]
) -> tuple[type[Sandbox], ParsedSettings]:
    """Return the class of a handle, and the settings of `kind` overridden by `options`."""
    if isinstance(kind, Binding):
        cls = find_class(kind.class_name, kind.file) if kind.class_name else Sandbox
        if not cls._declared:
            bound = ParsedSettings(settings=kind.settings)
            return cls, parse_settings(where, options).over(bound)
        bound_settings = {**cls._declared, **set_fields(kind.settings)}
        return cls, parse_settings(where, with_declared(bound_settings, options))
    if isinstance(kind, type) and issubclass(kind, Sandbox):
        return kind, parse_settings(where, with_declared(kind._declared, options))
    raise InvalidOption(
        f"the kind of a sandbox is a subclass of Sandbox or a binding, not {kind!r}.",
        hint='Pass get_sandbox("id"), get_sandbox(Kind, "id") or get_sandbox(env.Name, "id").',
        option="kind",
        value=repr(kind),
    )
