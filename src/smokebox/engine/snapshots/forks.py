"""Ids of forks, and the limits of forking."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from smokebox.engine.names import LONGEST_ID, check_id, random_id
from smokebox.errors import InvalidOption, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_FORKS = 256
_TOKEN = 8


def fork_ids(
    source: str, count: int = 1, ids: Sequence[str] | None = None, *, token: str | None = None
) -> list[str]:
    """Return the ids of forks: the given ones, or that of the source with a suffix.

    Args:
        source: Id of the sandbox that is forked.
        count: Number of forks, if `ids` does not tell.
        ids: Ids to use.
        token: Text for the suffix; by default a random one.
    """
    if ids is not None:
        if isinstance(ids, str) or not 1 <= len(ids) <= MAX_FORKS or count not in (1, len(ids)):
            _refuse("ids", ids, f"ids is a list of 1 to {MAX_FORKS} ids, one for each fork.")
        chosen = [check_id(one) for one in ids]
        if len(set(chosen)) < len(chosen):
            _refuse("ids", ids, "each fork has an id of its own.")
        return chosen
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_FORKS:
        _refuse("count", count, f"count is a whole number from 1 to {MAX_FORKS}, not {count!r}.")
    token = (token or random_id())[:_TOKEN]
    suffixes = [token] if count == 1 else [f"{token}-{number}" for number in range(1, count + 1)]
    longest = max(map(len, suffixes))
    # The whole id of the source if there is room, and its beginning always.
    start = source[: LONGEST_ID - longest - 1].rstrip("-")
    return [f"{start}-{suffix}" for suffix in suffixes]


def no_memory(id: str) -> Unsupported:
    """Return the error for a fork with its processes."""
    return Unsupported(
        "a fork has the files of its sandbox, and not its processes: CRIU cannot dump processes in "
        "a user namespace of their own, and runsc saves no sandbox with open host sockets.",
        hint="Leave memory out, and start the processes again in the fork.",
        operation="fork(memory=True)",
        sandbox=id,
    )


def _refuse(option: str, value: object, problem: str) -> NoReturn:
    raise InvalidOption(
        problem, hint="Pass for example count=8, or ids=['a', 'b'].", option=option, value=value
    )
