"""How much of the host a sandbox may use: by number, or by the name of an instance type."""

from __future__ import annotations

import difflib
import re
import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import NoReturn, Self

from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown, strict_fields

MIB = 1 << 20
GIB = 1 << 30
GB = 10**9

# A size below this is a number of megabytes that was meant otherwise.
SMALLEST = 64 << 10
LARGEST = 1 << 62
# What the kernel takes: the shortest quota of a period, PID_MAX_LIMIT, and fs.nr_open.
LEAST_CPU = 0.01
MOST_CPU = 4096
MOST_PIDS = 1 << 22
MOST_FILES = 1 << 20

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:([kmgtp])(i?b?)|b)?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SIZES = frozenset({"memory", "disk", "output_rate", "file_size", "core"})


def _refuse(option: str, value: object, wanted: str, hint: str) -> NoReturn:
    text = ascii(value)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    raise InvalidOption(
        f"{option} is {wanted}, not {shown}.", hint=hint, option=option, value=value
    )


def _check_whole(option: str, value: object, *, least: int = 1, most: int = LARGEST) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(option, value, "a whole number or None", "Pass an int.")
    if least == SMALLEST and 0 < value < least:
        _refuse(
            option,
            value,
            f"at least {least} bytes",
            f"Sizes are in bytes: for megabytes, pass {value} * 1024 * 1024.",
        )
    if not least <= value <= most:
        _refuse(option, value, f"from {least} to {most}", "Pass None for no limit.")


def _check_cpu(value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse("cpu", value, "a number of cores or None", "Pass for example cpu=0.5.")
    if not LEAST_CPU <= value <= MOST_CPU:
        _refuse("cpu", value, f"from {LEAST_CPU} to {MOST_CPU} cores", "Pass None for no limit.")


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes, cores and counts; None is no limit.

    `output_rate` is bytes a second of what commands print. The rest holds for all of the
    sandbox together, `open_files` for each process.
    """

    memory: int | None = 4 * GIB
    cpu: float | None = None
    pids: int | None = 1024
    disk: int | None = 8 * GB
    open_files: int | None = 4096
    output_rate: int | None = None

    def __post_init__(self) -> None:
        _check_whole("memory", self.memory, least=SMALLEST)
        _check_cpu(self.cpu)
        _check_whole("pids", self.pids, most=MOST_PIDS)
        _check_whole("disk", self.disk, least=SMALLEST)
        _check_whole("open_files", self.open_files, most=MOST_FILES)
        _check_whole("output_rate", self.output_rate)

    def describe(self) -> str:
        """One line for people, such as "1/4 CPU, 1 GiB memory, 4 GB disk, 1024 processes"."""
        said = [
            None if self.cpu is None else _cores(self.cpu),
            None if self.memory is None else f"{_binary(self.memory)} memory",
            None if self.disk is None else f"{_decimal(self.disk)} disk",
            None if self.pids is None else f"{self.pids} process{'es' * (self.pids != 1)}",
            None if self.output_rate is None else f"{_decimal(self.output_rate)}/s output",
        ]
        return ", ".join(part for part in said if part) or "no limits"

    def to_json(self) -> dict[str, float | None]:
        """Every limit by name, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Self:
        """The limits that `to_json` gave."""
        return cls(**data)  # type: ignore[arg-type]


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Bytes, seconds and counts for each process of one command; None leaves the sandbox's own.

    `processes` counts all that the user of the command has in the sandbox. A file that
    grows past `file_size` and a process past `cpu_seconds` get a signal, as from `ulimit`.
    """

    memory: int | None = None
    cpu_seconds: int | None = None
    file_size: int | None = None
    open_files: int | None = None
    processes: int | None = None
    core: int | None = 0

    def __post_init__(self) -> None:
        _check_whole("memory", self.memory, least=SMALLEST)
        _check_whole("cpu_seconds", self.cpu_seconds)
        _check_whole("file_size", self.file_size)
        _check_whole("open_files", self.open_files, most=MOST_FILES)
        _check_whole("processes", self.processes, most=MOST_PIDS)
        _check_whole("core", self.core, least=0)

    def rlimits(self) -> dict[int, int]:
        """The `RLIMIT_*` numbers and the values to set, for what is limited."""
        wanted = {
            resource.RLIMIT_AS: self.memory,
            resource.RLIMIT_CPU: self.cpu_seconds,
            resource.RLIMIT_FSIZE: self.file_size,
            resource.RLIMIT_NOFILE: self.open_files,
            resource.RLIMIT_NPROC: self.processes,
            resource.RLIMIT_CORE: self.core,
        }
        return {number: value for number, value in wanted.items() if value is not None}


INSTANCE_TYPES: Mapping[str, Limits] = {
    "lite": Limits(cpu=1 / 16, memory=256 * MIB, disk=2 * GB),
    "basic": Limits(cpu=1 / 4, memory=1 * GIB, disk=4 * GB),
    "standard-1": Limits(cpu=1 / 2, memory=4 * GIB, disk=8 * GB),
    "standard-2": Limits(cpu=1, memory=6 * GIB, disk=12 * GB),
    "standard-3": Limits(cpu=2, memory=8 * GIB, disk=16 * GB),
    "standard-4": Limits(cpu=4, memory=12 * GIB, disk=20 * GB),
}
"""The sizes that have a name, smallest first."""


def parse_limits(value: Limits | str | Mapping[str, object] | None) -> Limits:
    """`value` as `Limits`: the name of an instance type, or a mapping as of `smokebox.toml`.

    Sizes in a mapping may be text such as "512MiB", and what it leaves out has its default.
    """
    if value is None:
        return Limits()
    if isinstance(value, Limits):
        return value
    if isinstance(value, str):
        return _instance_type(value)
    return Limits(**_options("limits", value, Limits))  # type: ignore[arg-type]


def parse_process_limits(value: ProcessLimits | Mapping[str, object] | None) -> ProcessLimits:
    """`value` as `ProcessLimits`, with sizes in a mapping as numbers or as text."""
    if value is None:
        return ProcessLimits()
    if isinstance(value, ProcessLimits):
        return value
    return ProcessLimits(**_options("limits", value, ProcessLimits))  # type: ignore[arg-type]


def parse_size(text: object, option: str) -> int:
    """The bytes that `text` says: a whole number, or a number with a unit.

    "kB", "MB", "GB" are powers of 1000; "KiB", "MiB", "GiB", and the bare letters as in
    `docker run --memory 2g`, powers of 1024. Case does not matter.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        _refuse(option, text, "a number of bytes", "Pass for example '512MiB', '2GB' or 1048576.")
    number, letter, rest = match.groups()
    base = 1000 if rest and rest.lower() == "b" else 1024
    return int(Fraction(number) * base ** _POWERS.get((letter or "").lower(), 0))


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
    return {
        name: parse_size(given, name) if name in _SIZES and given is not None else given
        for name, given in value.items()
    }


def _cores(cpu: float) -> str:
    nearest = Fraction(cpu).limit_denominator(16)
    text = str(nearest) if nearest == cpu and nearest < 1 else f"{cpu:g}"
    return f"{text} CPU{'s' * (cpu > 1)}"


def _binary(size: int) -> str:
    for unit, bytes_each in (("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if size >= bytes_each:
            return f"{round(size / bytes_each, 1):g} {unit}"
    return f"{size} bytes"


def _decimal(size: int) -> str:
    for unit, bytes_each in (("GB", GB), ("MB", 10**6), ("kB", 10**3)):
        if size >= bytes_each:
            return f"{round(size / bytes_each, 1):g} {unit}"
    return f"{size} bytes"
