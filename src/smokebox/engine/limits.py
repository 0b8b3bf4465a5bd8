"""How much of the host a sandbox may use: by number, or by the name of an instance type."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes, cores and counts; None is no limit."""

    memory: int | None = 4 * GIB
    cpu: float | None = None
    pids: int | None = 1024
    disk: int | None = 8 * 10**9
    open_files: int | None = 4096
    output_rate: int | None = None
