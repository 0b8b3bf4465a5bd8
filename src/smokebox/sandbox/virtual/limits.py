"""What a script may use before it is stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from smokebox.errors import InvalidOption
from smokebox.options import strict_fields
from smokebox.sandbox.filesystems.native import MAX_FILE_SIZE, MAX_FILES, MAX_TOTAL_SIZE

# The engine keeps no more than this of each stream, on every path.
MAX_OUTPUT = 10 << 20


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds for one `exec`, and for the files of a sandbox.

    `commands` and `loop_iterations` count within one `exec`, `memory` is what the variables
    of the shell may hold, `output` is bytes of each stream, `wall_time` is seconds. When the
    process grows by more than `process_growth` bytes, the scripts that run are stopped. Files in
    memory have at most `file_size` bytes each and `storage` together, and there are at most
    `files` of them; the defaults are those of the shell's own filesystem, which is the fast
    one, and other values mean a filesystem in Python.
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
                f"output is at most {MAX_OUTPUT} bytes a stream, not {self.output}.",
                hint="Redirect long output to a file and read that.",
                option="output",
                value=self.output,
            )

    @property
    def native_files(self) -> bool:
        """Whether the shell's own filesystem keeps these limits."""
        wanted = (self.file_size, self.storage, self.files)
        return wanted == (MAX_FILE_SIZE, MAX_TOTAL_SIZE, MAX_FILES)


def check_limits(limits: Limits | Mapping[str, float] | None) -> Limits:
    """`limits` as `Limits`, from a mapping of names to values too."""
    if isinstance(limits, Limits):
        return limits
    if limits is None:
        return Limits()
    if not isinstance(limits, Mapping):
        raise InvalidOption(
            f"limits is a Limits or a mapping, not {type(limits).__name__}.",
            hint="Pass for example limits=Limits(wall_time=10).",
            option="limits",
        )
    return Limits(**limits)  # type: ignore[arg-type]


def _check(name: str, value: object, *, whole: bool) -> None:
    kinds = (int,) if whole else (int, float)
    if (
        isinstance(value, bool)
        or not isinstance(value, kinds)
        or not 0 < value < (1 << 62 if whole else 1e9)
    ):
        kind = "a positive whole number" if whole else "a positive number of seconds"
        raise InvalidOption(
            f"{name} is {kind}, not {value!r}.",
            hint="Leave it out for the default.",
            option=name,
            value=value,
        )
