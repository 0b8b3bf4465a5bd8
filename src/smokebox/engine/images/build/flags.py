"""Flags of instructions, such as `--chown`, and the options of `RUN --mount`."""

from __future__ import annotations

import csv
import re
from typing import TYPE_CHECKING, get_args

from smokebox.engine.images.build.instructions import MountKind, MountOption
from smokebox.engine.images.build.problems import invalid, refused, suggestion

if TYPE_CHECKING:
    from collections.abc import Sequence

KNOWN: dict[str, frozenset[str]] = {
    "FROM": frozenset({"platform"}),
    "RUN": frozenset({"mount", "network", "security", "device"}),
    "COPY": frozenset({"from", "chown", "chmod", "link", "exclude", "parents"}),
    "ADD": frozenset({"chown", "chmod", "link", "exclude", "keep-git-dir", "checksum", "unpack"}),
    "HEALTHCHECK": frozenset({"interval", "timeout", "start-period", "start-interval", "retries"}),
}
_REPEATABLE = {"mount", "exclude"}
_BOOLEAN = {"link", "parents", "keep-git-dir", "unpack"}
_TRUTH = {"true": True, "1": True, "false": False, "0": False}

_MOUNT_KEYS = {
    "type": "type",
    "target": "target",
    "dst": "target",
    "destination": "target",
    "source": "source",
    "src": "source",
    "from": "from",
    "id": "id",
    "env": "env",
    "mode": "mode",
    "uid": "uid",
    "gid": "gid",
    "size": "size",
    "sharing": "sharing",
    "required": "required",
    "readonly": "readonly",
    "ro": "readonly",
    "readwrite": "readwrite",
    "rw": "readwrite",
}
_MOUNT_FLAGS = {"readonly", "readwrite", "required"}
_SIZE = re.compile(r"(\d+)([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_NANOSECONDS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
_SECRETS = "/run/secrets"


class Flags:
    """The flags of one instruction, checked against those it takes."""

    def __init__(self, file: str, line: int, name: str, flags: Sequence[str]) -> None:
        self._file = file
        self._line = line
        self._values: dict[str, list[str]] = {}
        known = KNOWN.get(name, frozenset())
        for flag in flags:
            key, equals, value = flag.removeprefix("--").partition("=")
            if key not in known:
                hint = suggestion(key, known) if known else f"{name} takes no flags."
                raise invalid(file, line, f"{name} has no flag --{key}", hint)
            if not equals and key not in _BOOLEAN:
                raise invalid(file, line, f"--{key} needs a value", f"Write --{key}=VALUE.")
            if key in self._values and key not in _REPEATABLE:
                raise invalid(file, line, f"--{key} is given twice", "Give it once.")
            self._values.setdefault(key, []).append(value if equals else "true")

    def all(self, name: str) -> tuple[str, ...]:
        """Return the values of a flag that may be repeated."""
        return tuple(self._values.get(name, ()))

    def get(self, name: str, default: str = "") -> str:
        """Return the value of a flag, or `default` if it is missing."""
        return self._values.get(name, [default])[-1]

    def is_set(self, name: str) -> bool:
        """Return True for a boolean flag that is set."""
        return bool(self.truth(name))

    def truth(self, name: str) -> bool | None:
        """Return the value of a boolean flag, or None if it is missing."""
        if name not in self._values:
            return None
        value = self._values[name][-1].lower()
        if value not in _TRUTH:
            raise invalid(self._file, self._line, f"--{name} is true or false, not {value!r}", "")
        return _TRUTH[value]


def parse_mount(file: str, line: int, text: str) -> MountOption:
    """Parse the value of `--mount`, in which variables are expanded.

    Raises:
        Unsupported: Its type is not supported.
        InvalidDockerfile: It is not valid.
    """
    options = _mount_options(file, line, text)
    kind = options.get("type", "bind")
    if kind == "ssh":
        raise refused(
            file,
            line,
            "RUN --mount=type=ssh",
            "builds have no SSH agent",
            "Clone over https, with a token passed as --mount=type=secret.",
        )
    if kind not in get_args(MountKind):
        hint = suggestion(kind, get_args(MountKind))
        raise invalid(file, line, f"RUN --mount has no type {kind!r}", hint)
    if kind == "cache" and (options.get("from") or options.get("source")):
        raise refused(
            file,
            line,
            "RUN --mount=type=cache with from or source",
            "a cache starts empty",
            "Copy the files into the cache in the RUN itself.",
        )
    target, id = options.get("target", ""), options.get("id", "")
    if kind == "secret":
        id = id or target.rpartition("/")[2]
        target = target or ("" if options.get("env") else f"{_SECRETS}/{id}")
        if not id:
            raise invalid(file, line, "a secret needs an id", "Write --mount=type=secret,id=NAME.")
    elif not target:
        raise invalid(file, line, "a mount needs a target", "Write target=/path.")
    return MountOption(
        kind=kind,  # type: ignore[arg-type]
        target=target,
        source=options.get("source", ""),
        stage=options.get("from", ""),
        id=id or target,
        env=options.get("env", ""),
        mode=_number(file, line, "mode", options.get("mode"), 8),
        uid=_number(file, line, "uid", options.get("uid"), 10) or 0,
        gid=_number(file, line, "gid", options.get("gid"), 10) or 0,
        size=_size(file, line, options.get("size")),
        required=_TRUTH.get(options.get("required", "false").lower(), False),
    )


def _mount_options(file: str, line: int, text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for field in next(csv.reader([text]), []):
        name, equals, value = field.partition("=")
        key = _MOUNT_KEYS.get(name.strip().lower())
        if key is None:
            hint = suggestion(name, _MOUNT_KEYS)
            raise invalid(file, line, f"RUN --mount has no option {name!r}", hint)
        if not equals and key not in _MOUNT_FLAGS:
            raise invalid(file, line, f"the option {name} of --mount needs a value", "")
        options[key] = value if equals else "true"
    return options


def _number(file: str, line: int, name: str, text: str | None, base: int) -> int | None:
    if text is None:
        return None
    try:
        return int(text, base)
    except ValueError:
        raise invalid(file, line, f"{name}={text} of --mount is not a number", "") from None


def _size(file: str, line: int, text: str | None) -> int | None:
    if text is None:
        return None
    found = _SIZE.fullmatch(text)
    if found is None:
        raise invalid(file, line, f"size={text} of --mount is not a size", "Write size=64m.")
    return int(found[1]) << _UNITS[found[2].lower()]


def parse_duration(file: str, line: int, name: str, text: str) -> int:
    """Parse a duration such as `1m30s` into nanoseconds."""
    total, end = 0.0, 0
    for part in _DURATION.finditer(text):
        if part.start() != end:
            break
        total += float(part[1]) * _NANOSECONDS[part[2]]
        end = part.end()
    if not text or end != len(text):
        raise invalid(file, line, f"--{name}={text} is not a duration", "Write 30s or 1m30s.")
    return round(total)
