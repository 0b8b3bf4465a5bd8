"""`Sandbox`, the handle of a Linux sandbox: its lifecycle; the other methods are in its bases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

from smokebox.client.sandbox_commands import SandboxCommands
from smokebox.client.sandbox_connection import SandboxConnection
from smokebox.client.sandbox_files import SandboxFiles
from smokebox.client.sandbox_network import SandboxNetwork
from smokebox.client.sandbox_snapshots import SandboxSnapshots
from smokebox.client.sandbox_storage import SandboxStorage
from smokebox.client.settings import (
    ClientSettings,
    ParsedSettings,
    SandboxSettings,
    declared,
    parse_settings,
    with_declared,
)
from smokebox.errors import InvalidOption, NotFound
from smokebox.foundation.ids import new_global_id
from smokebox.types import Capabilities, SandboxInfo, SandboxStats
from smokebox.wire import requests, responses

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from smokebox.client.transport import Transport
    from smokebox.egress.handler import Handler


class Sandbox(SandboxCommands, SandboxFiles, SandboxStorage, SandboxSnapshots, SandboxNetwork):
    """One Linux sandbox by its id. Nothing starts until the first call.

    `get_sandbox` returns a handle; handles are cheap, and several may share one id. `create`
    makes a sandbox that is destroyed at the end of its `async with` block. Attributes of a
    subclass are settings of its sandboxes: `class Small(Sandbox): limits = "lite"`. It
    satisfies `SandboxApi`, so an agent can work in it.
    """

    _declared: ClassVar[Mapping[str, Any]] = {}
    """Settings that a subclass and its parents have as attributes."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._declared = {**cls._declared, **declared(cls)}
        with_declared(cls._declared, {})

    def __init__(
        self,
        id: str,
        transport: Transport,
        settings: ClientSettings,
        handlers: Mapping[str, Handler] | None = None,
    ) -> None:
        self.id = id
        self._connection = SandboxConnection(id, transport, settings, handlers or {})
        self._destroy_on_close = False

    @classmethod
    def get(cls, id: str, **settings: Unpack[SandboxSettings]) -> Self:
        """Return the sandbox of an id on the default server, as `get_sandbox` does.

        Args:
            id: Id of the sandbox.
            **settings: See `SandboxSettings`.

        Raises:
            InvalidOption: A setting is unknown or has a wrong type, or the id is invalid.
        """
        from smokebox.client.client import get_sandbox

        return get_sandbox(cls, id, **settings)

    @classmethod
    async def create(cls, **settings: Unpack[SandboxSettings]) -> Self:
        """Create a sandbox with a random id, destroyed at the end of its `async with` block.

        Args:
            **settings: See `SandboxSettings`.

        Raises:
            InvalidOption: A setting is unknown or invalid.
            ServiceUnavailable: The server cannot be reached.
        """
        from smokebox.client.client import default_client

        return await default_client().create(cls, **settings)

    async def info(self) -> SandboxInfo | None:
        """Return its state without waking or creating it; None if it does not exist."""
        try:
            return await self._connection.transport.request(
                SandboxInfo, "GET", self._connection.root
            )
        except NotFound:
            return None

    async def stats(self) -> SandboxStats:
        """Return its current use of memory, CPU and disk, without waking it."""
        return await self._connection.request(SandboxStats, "GET", "/stats")

    async def capabilities(self) -> Capabilities:
        """Return the features that this sandbox has and lacks; wakes it."""
        return await self._connection.request(Capabilities, "GET", "/capabilities", timeout=None)

    async def update(self, **settings: Unpack[SandboxSettings]) -> SandboxInfo:
        """Change settings; those omitted keep their values. Creates the sandbox if needed.

        Args:
            **settings: See `SandboxSettings`.

        Raises:
            InvalidOption: A setting is unknown or invalid.
        """
        connection = self._connection
        before = ParsedSettings(settings=connection.settings, handlers=connection.channel.handlers)
        options = dict(settings)
        if options.get("egress") is not None:
            options["egress"] = with_declared(self._declared, options)["egress"]
        parsed = parse_settings("update()", options)
        connection.settings = parsed.over(before).settings
        connection.channel.handlers.update(parsed.handlers)
        if parsed.handlers and connection.created:
            # Before the policy names them: from then on the server calls them.
            await connection.channel.open()
        return await connection.put()

    async def wake(self) -> SandboxInfo:
        """Start it if it is asleep. Every call that needs it running does so too."""
        return await self._connection.request(SandboxInfo, "POST", "/wake", timeout=None)

    async def sleep(self) -> SandboxInfo:
        """Stop its processes and keep its files, as it does by itself when idle."""
        return await self._connection.request(SandboxInfo, "POST", "/sleep", timeout=None)

    async def destroy(self) -> None:
        """Destroy it with its files. Safe to repeat; the next call creates an empty one."""
        await self._connection.destroy()

    async def fork(
        self, count: int = 1, *, ids: Sequence[str] | None = None, memory: bool = False
    ) -> list[Self]:
        """Create sandboxes that go on from the present state of this one: all of them, or none.

        They have its files, image, egress policy, environment, limits, labels, settings and
        sessions, but no processes, exposed ports or mounts. Each starts with its first call, and
        lives until it is destroyed.

        Args:
            count: Number of forks.
            ids: Their ids; by default that of this sandbox with a suffix.
            memory: Not supported: processes are not copied.

        Raises:
            Conflict: An id is taken.
            Unsupported: `memory` is set.
        """
        body = requests.Fork(count=count, ids=None if ids is None else [*ids], memory=memory)
        response = await self._connection.request(
            responses.Sandboxes,
            "POST",
            "/fork",
            body=body,
            timeout=None,
            idempotency_key=new_global_id(),
        )
        # Their settings are those of this sandbox: none have to be sent.
        transport, handlers = self._connection.transport, self._connection.channel.handlers
        return [
            type(self)(info.id, transport, ClientSettings(), handlers)
            for info in response.sandboxes
        ]

    async def aclose(self) -> None:
        """Close the handle. A sandbox made by `create` is destroyed, others are kept.

        Handlers that are functions of this process are disconnected.
        """
        if self._destroy_on_close:
            await self.destroy()
        await self._connection.channel.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id!r} at {self._connection.transport.address}>"


def find_class(name: str, wanted_by: str) -> type[Sandbox]:
    """Return the subclass of `Sandbox` of that name, which the program has defined or imported.

    Args:
        name: Name of the class.
        wanted_by: Name of the file that asks for it, in errors.

    Raises:
        InvalidOption: There is none, or several modules have one.
    """
    # A reloaded module defines a class again: the last one counts.
    found = {one.__module__: one for one in _subclasses(Sandbox) if one.__name__ == name}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise InvalidOption(
            f"{wanted_by}: the modules {', '.join(found)} have a class {name} each.",
            hint="Rename one of them.",
            option="class_name",
            value=name,
        )
    raise InvalidOption(
        f"{wanted_by}: no class {name!r} is defined.",
        hint=f"Write `class {name}(Sandbox)` where the program uses it, or import its module "
        "there; without handlers of its own, class_name can be left out.",
        option="class_name",
        value=name,
    )


def _subclasses(cls: type[Sandbox]) -> Iterator[type[Sandbox]]:
    for one in cls.__subclasses__():
        yield one
        yield from _subclasses(one)
