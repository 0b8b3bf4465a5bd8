"""Settings of the `[app]` table of a project."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from smokebox.client.bindings import sandbox_bindings
from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown
from smokebox.project import load_config
from smokebox.tenancy.connections import HEAD_SECONDS, PER_ADDRESS, ConnectionLimits

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FOLDER = ".smokebox"
STATE = "SMOKEBOX_APP_STATE"
KEYS = "SMOKEBOX_APP_KEYS"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """Settings of an app.

    - `state`: folder of its files, relative to the project; SMOKEBOX_APP_STATE overrides it.
    - `store`: store of conversations: a file, by default in `state`, or `postgres://...`.
    - `concurrency`: number of conversations and runs worked on at once.
    - `idle`: seconds after which the workspace of an unused conversation is closed.
    - `grace`: seconds that running work has to end when the app is stopped; the rest continues at
      the next start.
    - `retention`: seconds for which ended work is kept; None keeps it.
    - `max_body`: largest body of a request, in bytes.
    - `head_timeout`: seconds that the head of a request may take.
    - `address_connections`: open connections of each address.
    - `max_connections`: open connections in all; None: half of the files that may be open.
    - `trusted_proxies`: addresses and networks of proxies that name their clients in
      X-Forwarded-For.
    """

    state: str = FOLDER
    store: str | None = None
    concurrency: int = 64
    idle: float = 600.0
    grace: float = 10.0
    retention: float | None = None
    max_body: int = 32 * 1024 * 1024
    head_timeout: float = HEAD_SECONDS
    address_connections: int = PER_ADDRESS
    max_connections: int | None = None
    trusted_proxies: tuple[str, ...] = ()

    def connections(self) -> ConnectionLimits:
        """Return the limits of open connections."""
        return ConnectionLimits(
            per_address=self.address_connections,
            total=self.max_connections,
            trusted_proxies=self.trusted_proxies,
            setting=lambda name: f"`{name}` in [app] of smokebox.toml",
        )

    def folder(self, project: Path) -> Path:
        """Return the folder of the app's files."""
        return (project / self.state).absolute()

    def conversations(self, project: Path) -> str:
        """Return the store of conversations, as `open_store` takes it."""
        if self.store is not None and "://" in self.store:
            return self.store
        if self.store is not None:
            return str((project / self.store).absolute())
        return str(self.folder(project) / "conversations.db")


def load_settings(project: Path) -> AppSettings:
    """Read the settings of a project. Raises `InvalidOption` with the file's name."""
    config = load_config(project)
    # A bad binding is an error when the app starts, not when an agent first uses it.
    sandbox_bindings(config)
    where = f"{config.file}: [app]"
    options = dict(config.app)
    refuse_unknown(where, options, [field.name for field in fields(AppSettings)])
    for name in ("grace", "head_timeout", "idle", "retention"):
        if name in options:
            options[name] = _seconds(where, name, options[name])
    for name in ("address_connections", "concurrency", "max_body", "max_connections"):
        if name in options and (not _is_integer(options[name]) or options[name] < 1):
            raise _invalid(where, name, options[name], "a positive integer")
    for name in ("state", "store"):
        if name in options and not (isinstance(options[name], str) and options[name]):
            raise _invalid(where, name, options[name], "a path")
    if "trusted_proxies" in options:
        proxies = options["trusted_proxies"]
        if not isinstance(proxies, list) or not all(isinstance(one, str) for one in proxies):
            raise _invalid(where, "trusted_proxies", proxies, "a list of addresses")
        options["trusted_proxies"] = tuple(proxies)
    if state := os.environ.get(STATE):
        options["state"] = state
    return AppSettings(**options)


def app_keys(secrets: Mapping[str, str] | Any) -> tuple[str, ...]:
    """Return the keys of operators from the environment or `.env`."""
    return tuple(filter(None, (one.strip() for one in (secrets.get(KEYS) or "").split(","))))


def _seconds(where: str, name: str, value: object) -> float:
    if isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        return float(match[1]) * _UNITS[match[2]]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise _invalid(where, name, value, "seconds, or text such as '30d', '12h', '10m'")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _invalid(where: str, name: str, value: object, expected: str) -> InvalidOption:
    return InvalidOption(
        f"{where}: {name} must be {expected}, not {value!r:.80}.",
        hint="Fix that line.",
        option=name,
        value=value,
    )
