"""Connections to a Postgres server: a pool for queries, and one that holds locks and listens."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from smokebox.agents.log.postgres_tables import CHANNEL, LOCK, UNLOCK, migrate
from smokebox.agents.log.store import Wakeups, closed
from smokebox.errors import (
    InvalidOption,
    MissingDependency,
    NotFound,
    ServiceUnavailable,
    SmokeboxError,
    Unauthorized,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_CONNECT_SECONDS = 10.0
_COMMAND_SECONDS = 60.0
_CLOSE_SECONDS = 5.0
_MAX_CONNECTIONS = 8
# After this time the server drops an unreachable host's connection, and with it the locks.
_KEEPALIVE = {
    "tcp_keepalives_idle": "15",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}


class PostgresPool:
    """Connections to a database, opened on first use."""

    def __init__(self, url: str) -> None:
        self.wakeups = Wakeups()
        self._url = url
        self._place = _without_password(url)
        self._pool: Any = None
        self._lock_connection: Any = None
        self._held: set[int] = set()
        self._reconnecting: asyncio.Future[None] | None = None
        self._opening = asyncio.Lock()
        # asyncpg runs one statement at a time on a connection.
        self._lock_mutex = asyncio.Lock()

    async def fetch(self, sql: str, *values: object) -> list[Any]:
        """Run a statement that may safely run twice, and return its rows.

        A connection that the server has closed fails only when it is used.
        """
        try:
            return await self._fetch(sql, values)
        except ServiceUnavailable:
            if self._pool is not None:
                # The other connections are probably closed too.
                await self._pool.expire_connections()
            return await self._fetch(sql, values)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """Return a connection in a transaction."""
        async with self._acquire() as connection, connection.transaction():
            yield connection

    async def lock(self, number: int) -> bool:
        """Lock a session; False if another process, or this one, holds the lock."""
        async with self._lock_mutex, self._translate_errors():
            if number in self._held:
                return False
            locked = bool(await self._fetch_lock(LOCK, number))
            if locked:
                self._held.add(number)
            return locked

    async def unlock(self, number: int) -> None:
        """Unlock a session. Safe to repeat."""
        async with self._lock_mutex, self._translate_errors():
            if number in self._held:
                self._held.discard(number)
                await self._fetch_lock(UNLOCK, number)

    async def ensure_locks(self) -> None:
        """Reconnect the connection that holds locks and listens, if it was lost."""
        for last in (False, True):
            if self._lock_connection is not None and not self._lock_connection.is_closed():
                return
            try:
                async with self._lock_mutex, self._translate_errors():
                    await self._connect()
            except ServiceUnavailable:
                # A server that restarts may close a connection right after accepting it.
                if last:
                    raise

    async def aclose(self) -> None:
        """Close all connections, which releases the locks. Safe to repeat."""
        if self.wakeups.closed:
            return
        self.wakeups.close()
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.wait([self._reconnecting])
        async with self._lock_mutex, self._opening:
            await _close(self._lock_connection)
            await _close(self._pool)

    async def _fetch(self, sql: str, values: tuple[object, ...]) -> list[Any]:
        async with self._acquire() as connection:
            rows: list[Any] = await connection.fetch(sql, *values)
            return rows

    async def _fetch_lock(self, sql: str, number: int) -> object:
        await self._connect()
        try:
            return await self._lock_connection.fetchval(sql, number)
        except BaseException:
            # The state of the lock is unknown. Closing the connection releases all locks, and
            # the next connection takes those in `_held` again.
            self._lock_connection.terminate()
            raise

    async def _connect(self) -> None:
        if self._lock_connection is not None and not self._lock_connection.is_closed():
            return
        await self._open()
        self._lock_connection = await _asyncpg().connect(
            self._url,
            timeout=_CONNECT_SECONDS,
            command_timeout=_COMMAND_SECONDS,
            server_settings=_KEEPALIVE,
        )
        self._lock_connection.add_termination_listener(self._terminated)
        try:
            await self._lock_connection.add_listener(CHANNEL, self._notified)
            for number in self._held:
                # If another process took the lock meanwhile, the next append is fenced.
                await self._lock_connection.fetchval(LOCK, number)
        except BaseException:
            # An open connection counts as one that listens and holds the locks.
            self._lock_connection.terminate()
            raise
        self.wakeups.wake_all()

    def _terminated(self, connection: Any) -> None:
        """Take the locks again at once, before another process does."""
        self.wakeups.wake_all()
        if self._held and not self.wakeups.closed:
            self._reconnecting = asyncio.ensure_future(self._reconnect())

    async def _reconnect(self) -> None:
        # If this fails, the next append tries again and raises the error.
        with contextlib.suppress(SmokeboxError):
            await self.ensure_locks()

    def _notified(self, connection: Any, pid: int, channel: str, payload: str) -> None:
        self.wakeups.wake(payload)

    @contextlib.asynccontextmanager
    async def _acquire(self) -> AsyncIterator[Any]:
        async with self._translate_errors():
            await self._open()
            async with self._pool.acquire(timeout=_CONNECT_SECONDS) as connection:
                yield connection

    async def _open(self) -> None:
        if self.wakeups.closed:
            raise closed(self._place)
        async with self._opening:
            if self._pool is not None:
                return
            pool = _asyncpg().create_pool(
                self._url,
                min_size=0,
                max_size=_MAX_CONNECTIONS,
                timeout=_CONNECT_SECONDS,
                command_timeout=_COMMAND_SECONDS,
            )
            await pool
            try:
                async with pool.acquire() as connection:
                    await migrate(connection)
            except BaseException:
                pool.terminate()
                raise
            self._pool = pool

    @contextlib.asynccontextmanager
    async def _translate_errors(self) -> AsyncIterator[None]:
        try:
            yield
        except SmokeboxError:
            raise
        except Exception as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> Exception:
        pg = _asyncpg()
        if isinstance(error, pg.InvalidPasswordError | pg.InvalidAuthorizationSpecificationError):
            return Unauthorized(
                f"{self._place} refused the login: {error}",
                hint="Check the user and the password in persist=.",
            )
        if isinstance(error, pg.InvalidCatalogNameError):
            return NotFound(
                f"{self._place}: {error}.",
                hint="Create it with createdb.",
                kind="database",
                name=self._place,
            )
        if isinstance(error, ValueError):
            return InvalidOption(
                f"persist={self._place!r} is not the URL of a database: {error}.",
                hint="Write postgres://user:password@host/database.",
                option="persist",
                value=self._place,
            )
        unreachable = (
            OSError,
            TimeoutError,
            pg.PostgresConnectionError,
            pg.InterfaceError,
            pg.OperatorInterventionError,
            # Raised for a connection that ends while it is returned to the pool.
            pg.InternalClientError,
        )
        if isinstance(error, unreachable):
            return ServiceUnavailable(
                f"{self._place} cannot be reached: {error or type(error).__name__}.",
                hint="Check the URL in persist=, and that the server runs.",
                service="postgres",
            )
        return error


async def _close(connection: Any) -> None:
    """Close a connection or pool; drop it if the server does not respond."""
    if connection is None:
        return
    try:
        await asyncio.wait_for(connection.close(), _CLOSE_SECONDS)
    except Exception:
        connection.terminate()


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    user, _, _ = parts.netloc.rpartition("@")
    host = parts.netloc.rpartition("@")[2]
    name = user.partition(":")[0]
    return f"{parts.scheme}://{f'{name}@' if name else ''}{host}{parts.path}"


def _asyncpg() -> Any:
    try:
        import asyncpg  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependency(
            "Postgres needs asyncpg, which is not installed.",
            hint="Run: pip install 'smokebox[postgres]'",
            package="asyncpg",
            extra="postgres",
        ) from error
    return asyncpg
