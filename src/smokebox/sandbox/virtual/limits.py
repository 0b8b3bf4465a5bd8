"""Resource limits of scripts in a virtual sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from smokebox.errors import InvalidOption
from smokebox.options import strict_fields
from smokebox.sandbox.filesystems.native import MAX_FILE_SIZE, MAX_FILES, MAX_TOTAL_SIZE

# The shell keeps at most this much of each stream.
MAX_OUTPUT = 10 << 20


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualLimits:
    """Bounds for one `exec`, and for the files of a sandbox.

    `commands` and `loop_iterations` count within one `exec`, `memory` bounds the shell's variables,
    `output` is bytes per stream, `wall_time` is seconds. When the process grows by more than
    `process_growth` bytes, running scripts are stopped. Files in memory have at most `file_size`
    bytes each and `storage` in total, and there are at most `files` of them. The defaults are those
    of the shell's own filesystem, which is fast; other values use a slower one in Python.
    """

    commands: int = 1_000_000
    loop_iterations: int = 1_000_000
    memory: int = 64 << 20
    output: int = MAX_OUTPUT
    wall_time: float = 60.0
    process_growth: int = 1 << 30
    file_size: int = MAX_FILE_SIZE
    storage: int = MAX_TOTAL_SIZE
    files: int = MAX_FILES

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name), whole=field.name != "wall_time")
        if self.output > MAX_OUTPUT:
            raise InvalidOption(
                f"output must be at most {MAX_OUTPUT} bytes per stream, not {self.output}.",
                hint="Redirect long output to a file and read that.",
                option="output",
                value=self.output,
            )

    @property
    def native_files(self) -> bool:
        """Return whether the shell's own filesystem enforces these limits."""
        wanted = (self.file_size, self.storage, self.files)
        return wanted == (MAX_FILE_SIZE, MAX_TOTAL_SIZE, MAX_FILES)


def check_limits(limits: VirtualLimits | Mapping[str, float] | None) -> VirtualLimits:
    """Return `limits` as `VirtualLimits`, also from a mapping."""
    if isinstance(limits, VirtualLimits):
        return limits
    if limits is None:
        return VirtualLimits()
    if not isinstance(limits, Mapping):
        raise InvalidOption(
            f"limits must be a VirtualLimits or a mapping, not {type(limits).__name__}.",
            hint="Pass limits=VirtualLimits(wall_time=10), for example.",
            option="limits",
        )
    return VirtualLimits(**limits)  # type: ignore[arg-type]


def _check(name: str, value: object, *, whole: bool) -> None:
    kinds = (int,) if whole else (int, float)
    if (
        isinstance(value, bool)
        or not isinstance(value, kinds)
        or not 0 < value < (1 << 62 if whole else 1e9)
    ):
        kind = "a positive integer" if whole else "a positive number of seconds"
        raise InvalidOption(
            f"{name} must be {kind}, not {value!r}.",
            hint="Leave it out for the default.",
            option=name,
            value=value,
        )
