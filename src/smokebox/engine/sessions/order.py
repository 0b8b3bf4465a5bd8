"""What a session is asked to run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from smokebox.engine.sessions.driver import assignments, pack_fields
from smokebox.errors import InvalidOption
from smokebox.options import check_env, check_timeout
from smokebox.sandbox.paths import check_path
from smokebox.sandbox.process import encode
from smokebox.sandbox.text import encode_option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A command for a shell, checked: its text, and what holds for it alone.

    `values` are what the text refers to as fields after those of `env`; `number` is that of
    its first field, and no other order's.
    """

    text: bytes
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    values: tuple[str, ...] = ()
    stdin: bytes | None = None
    timeout: float | None = None
    number: int = field(default_factory=_NUMBERS.__next__)

    @property
    def fields(self) -> bytes:
        """As bash reads it."""
        values = [encode(value, "env") for value in (*self.env.values(), *self.values)]
        return pack_fields([self.text, encode(self.cwd or "", "cwd"), *values])


def order_of(
    command: str,
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    timeout: float | None,
    stdin: str | bytes | None,
) -> Order:
    """The order to run a command, once everything about it can be."""
    if not isinstance(command, str):
        raise InvalidOption(
            f"a command of a session is a str, not {type(command).__name__}.",
            hint="For a list of words, pass shlex.join(words).",
            option="command",
        )
    return Order(
        text=encode(command, "command"),
        cwd=None if cwd is None else check_path(cwd),
        env=check_env(env),
        timeout=check_timeout(timeout),
        stdin=None if stdin is None else encode_option("stdin", stdin),
    )


def order_to_export(values: Mapping[str, str], removed: Sequence[str]) -> Order:
    """The order to export variables, and to unset others; their names are checked."""
    order = Order(text=b"", values=tuple(values.values()))
    return replace(order, text=assignments(tuple(values), removed, order.number))
