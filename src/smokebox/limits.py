"""Limits of a Linux sandbox and of one command: by number, by text such as "2GiB", or by name."""

from __future__ import annotations

import difflib
import re
import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import NoReturn, Self

from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown, strict_fields

MIB = 1 << 20
GIB = 1 << 30
GB = 10**9

# A smaller size is most likely a number of megabytes.
MIN_SIZE = 64 << 10
MAX_SIZE = 1 << 62
# Bounds of the kernel: the shortest quota of a period, PID_MAX_LIMIT, and fs.nr_open.
MIN_CPU = 0.01
MAX_CPU = 4096
MAX_PIDS = 1 << 22
MAX_OPEN_FILES = 1 << 20

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:([kmgtp])(i?b?)|b)?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def _refuse(option: str, value: object, wanted: str, hint: str) -> NoReturn:
    text = ascii(value)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    raise InvalidOption(
        f"{option} is {wanted}, not {shown}.", hint=hint, option=option, value=value
    )


def _count(option: str, value: object, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(option, value, "a whole number or None", "Pass an int.")
    if minimum == MIN_SIZE and 0 < value < minimum:
        _refuse(
            option,
            value,
            f"at least {minimum} bytes",
            f"Sizes are in bytes: for megabytes, pass {value} * 1024 * 1024.",
        )
    if not minimum <= value <= maximum:
        _refuse(option, value, f"from {minimum} to {maximum}", "Pass None for no limit.")
    return value


def parse_size(text: object, option: str) -> int:
    """Return the bytes in `text`: a whole number, or a number with a unit.

    "kB", "MB", "GB" are powers of 1000; "KiB", "MiB", "GiB", and the bare letters as in
    `docker run --memory 2g`, powers of 1024. Case does not matter.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        _refuse(option, text, "a number of bytes", "Pass for example '512MiB', '2GB' or 1048576.")
    from fractions import Fraction  # Imports decimal, which most calls do not need.

    number, letter, rest = match.groups()
    base = 1000 if rest and rest.lower() == "b" else 1024
    return int(Fraction(number) * base ** _POWERS.get((letter or "").lower(), 0))


def _size(option: str, value: object, *, minimum: int = 1) -> int | None:
    return None if value is None else _count(option, parse_size(value, option), minimum=minimum)


def _cpu(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse("cpu", value, "a number of cores or None", "Pass for example cpu=0.5.")
    if not MIN_CPU <= value <= MAX_CPU:
        _refuse("cpu", value, f"from {MIN_CPU} to {MAX_CPU} cores", "Pass None for no limit.")
    return value


@strict_fields
@dataclass(init=False, frozen=True, slots=True)
class Limits:
    """Limits of one Linux sandbox; None is no limit.

    Args:
        memory: Bytes of memory, as a number or as text such as "2GiB".
        cpu: Cores, such as 0.5.
        pids: Number of processes and threads.
        disk: Bytes that the sandbox may write, as a number or as text.
        open_files: Open files of each process.
        output_rate: Bytes a second that commands may print, as a number or as text.

    Raises:
        InvalidOption: A value is not a number of the right kind, or is out of range.
    """

    memory: int | None
    cpu: float | None
    pids: int | None
    disk: int | None
    open_files: int | None
    output_rate: int | None

    def __init__(
        self,
        *,
        memory: int | str | None = 4 * GIB,
        cpu: float | None = None,
        pids: int | None = 1024,
        disk: int | str | None = 8 * GB,
        open_files: int | None = 4096,
        output_rate: int | str | None = None,
    ) -> None:
        write = object.__setattr__
        write(self, "memory", _size("memory", memory, minimum=MIN_SIZE))
        write(self, "cpu", _cpu(cpu))
        write(self, "pids", _count("pids", pids, maximum=MAX_PIDS))
        write(self, "disk", _size("disk", disk, minimum=MIN_SIZE))
        write(self, "open_files", _count("open_files", open_files, maximum=MAX_OPEN_FILES))
        write(self, "output_rate", _size("output_rate", output_rate))

    def describe(self) -> str:
        """Return one line such as "1/4 CPU, 1 GiB memory, 4 GB disk, 1024 processes"."""
        parts = [
            None if self.cpu is None else _cores(self.cpu),
            None if self.memory is None else f"{binary_size(self.memory)} memory",
            None if self.disk is None else f"{decimal_size(self.disk)} disk",
            None if self.pids is None else f"{self.pids} process{'es' * (self.pids != 1)}",
            None if self.output_rate is None else f"{decimal_size(self.output_rate)}/s output",
        ]
        return ", ".join(part for part in parts if part) or "no limits"

    def to_json(self) -> dict[str, float | None]:
        """Return every limit by name, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Self:
        """Return the limits that `to_json` wrote."""
        return cls(**data)  # type: ignore[arg-type]


@strict_fields
@dataclass(init=False, frozen=True, slots=True)
class ProcessLimits:
    """Limits of each process of one command; None leaves those of the sandbox.

    A file that grows past `file_size` and a process that runs past `cpu_seconds` get a
    signal, as from `ulimit`.

    Args:
        memory: Bytes of address space, as a number or as text such as "512MiB".
        cpu_seconds: Seconds of CPU time.
        file_size: Bytes of the largest file it may write, as a number or as text.
        open_files: Open files.
        processes: All processes that the user of the command has in the sandbox.
        core: Bytes of a core dump, as a number or as text.

    Raises:
        InvalidOption: A value is not a number of the right kind, or is out of range.
    """

    memory: int | None
    cpu_seconds: int | None
    file_size: int | None
    open_files: int | None
    processes: int | None
    core: int | None

    def __init__(
        self,
        *,
        memory: int | str | None = None,
        cpu_seconds: int | None = None,
        file_size: int | str | None = None,
        open_files: int | None = None,
        processes: int | None = None,
        core: int | str | None = 0,
    ) -> None:
        write = object.__setattr__
        write(self, "memory", _size("memory", memory, minimum=MIN_SIZE))
        write(self, "cpu_seconds", _count("cpu_seconds", cpu_seconds))
        write(self, "file_size", _size("file_size", file_size))
        write(self, "open_files", _count("open_files", open_files, maximum=MAX_OPEN_FILES))
        write(self, "processes", _count("processes", processes, maximum=MAX_PIDS))
        write(self, "core", _size("core", core, minimum=0))

    def rlimits(self) -> dict[int, int]:
        """Return the values to set by `RLIMIT_*` number, without those that are None."""
        values = {
            resource.RLIMIT_AS: self.memory,
            resource.RLIMIT_CPU: self.cpu_seconds,
            resource.RLIMIT_FSIZE: self.file_size,
            resource.RLIMIT_NOFILE: self.open_files,
            resource.RLIMIT_NPROC: self.processes,
            resource.RLIMIT_CORE: self.core,
        }
        return {number: value for number, value in values.items() if value is not None}


INSTANCE_TYPES: Mapping[str, Limits] = {
    "lite": Limits(cpu=1 / 16, memory=256 * MIB, disk=2 * GB),
    "basic": Limits(cpu=1 / 4, memory=1 * GIB, disk=4 * GB),
    "standard-1": Limits(cpu=1 / 2, memory=4 * GIB, disk=8 * GB),
    "standard-2": Limits(cpu=1, memory=6 * GIB, disk=12 * GB),
    "standard-3": Limits(cpu=2, memory=8 * GIB, disk=16 * GB),
    "standard-4": Limits(cpu=4, memory=12 * GIB, disk=20 * GB),
}
"""Named limits, smallest first."""


def parse_limits(value: Limits | str | Mapping[str, object] | None) -> Limits:
    """Return `Limits` from the name of an instance type, or from a mapping as in `smokebox.toml`.

    Limits that a mapping leaves out have their defaults.
    """
    if value is None:
        return Limits()
    if isinstance(value, Limits):
        return value
    if isinstance(value, str):
        return _instance_type(value)
    return Limits(**_options("limits", value, Limits))  # type: ignore[arg-type]


def limits_to_json(limits: Limits | ProcessLimits | Mapping[str, object]) -> dict[str, object]:
    """Return limits by name, as they are sent to a server."""
    return dict(limits) if isinstance(limits, Mapping) else asdict(limits)


def parse_process_limits(value: ProcessLimits | Mapping[str, object] | None) -> ProcessLimits:
    """Return `ProcessLimits` from a mapping of names to values."""
    if value is None:
        return ProcessLimits()
    if isinstance(value, ProcessLimits):
        return value
    return ProcessLimits(**_options("limits", value, ProcessLimits))  # type: ignore[arg-type]


def _instance_type(name: str) -> Limits:
    if name in INSTANCE_TYPES:
        return INSTANCE_TYPES[name]
    near = difflib.get_close_matches(name.lower(), INSTANCE_TYPES, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(INSTANCE_TYPES)}."
    raise InvalidOption(
        f"there is no instance type {name!r}.", hint=hint, option="limits", value=name
    )


def _options(option: str, value: object, kind: type[Limits | ProcessLimits]) -> dict[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        _refuse(
            option,
            value,
            f"a {kind.__name__} or a mapping of names to values",
            "Pass for example limits={'memory': '1GiB', 'open_files': 1024}.",
        )
    refuse_unknown(option, value, {field.name for field in fields(kind)})
    return dict(value)


def _cores(cpu: float) -> str:
    from fractions import Fraction

    nearest = Fraction(cpu).limit_denominator(16)
    text = str(nearest) if nearest == cpu and nearest < 1 else f"{cpu:g}"
    return f"{text} CPU{'s' * (cpu > 1)}"


def binary_size(size: float) -> str:
    """Format a size in powers of 1024, such as "1.5 GiB"."""
    return _amount(size, (("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)))


def decimal_size(size: float) -> str:
    """Format a size in powers of 1000, such as "1.5 GB"."""
    return _amount(size, (("GB", GB), ("MB", 10**6), ("kB", 10**3)))


def _amount(size: float, units: tuple[tuple[str, int], ...]) -> str:
    for unit, bytes_each in units:
        if size >= bytes_each:
            return f"{round(size / bytes_each, 1):g} {unit}"
    return f"{size:.0f} bytes"
