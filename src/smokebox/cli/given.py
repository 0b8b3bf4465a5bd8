"""What people write on a command line, as the values that the API takes."""

from __future__ import annotations

import re

from smokebox.errors import InvalidOption

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def parse_pairs(option: str, given: list[str] | None) -> dict[str, str] | None:
    """NAME=VALUE texts by name; None where nothing was given."""
    if not given:
        return None
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidOption(
                f"{option} takes NAME=VALUE, not {text!r}.",
                hint=f"Pass for example {option} NAME=VALUE; repeat it for more.",
                option=option,
                value=text,
            )
        found[name] = value
    return found


def parse_limits(text: str | None) -> str | dict[str, float | str | None] | None:
    """The name of an instance type as it is, or limits by name from `memory=1GiB,cpu=2`."""
    if text is None or "=" not in text:
        return text
    found = parse_pairs("--limits", text.split(",")) or {}
    return {name: _limit(value) for name, value in found.items()}


def parse_duration(option: str, text: str) -> float:
    """Seconds, from text such as `90`, `30s`, `10m`, `2h`, `30d` or `4w`."""
    match = _DURATION.fullmatch(text)
    if match is None or not float(match[1]):
        raise InvalidOption(
            f"{option} takes a length of time, not {text!r}.",
            hint=f"Pass for example {option} 30s, 10m, 2h or 30d.",
            option=option,
            value=text,
        )
    return float(match[1]) * _SECONDS[match[2]]


def parse_command(words: list[str]) -> str | list[str]:
    """One word is a line for bash, several are a program and its arguments."""
    return words[0] if len(words) == 1 else words


def parse_forward(text: str) -> tuple[int, int]:
    """The port here and the one there of `8080:3000`; one alone is the same on both sides."""
    here, colon, there = text.partition(":")
    ports = (here, there if colon else here)
    if not all(port.isascii() and port.isdigit() and int(port) < 65536 for port in ports):
        raise InvalidOption(
            f"{text!r} does not name two ports.",
            hint="Pass for example 8080:3000, for port 3000 of the sandbox at 8080 here.",
            option="ports",
            value=text,
        )
    if int(ports[1]) == 0:
        raise InvalidOption(
            f"no sandbox has a port 0, as {text!r} says.",
            hint="A port there is from 1 to 65535; here it may be 0, for any that is free.",
            option="ports",
            value=text,
        )
    return int(ports[0]), int(ports[1])


def _limit(text: str) -> float | str | None:
    if text in ("none", ""):
        return None
    if not _NUMBER.fullmatch(text):
        return text
    return float(text) if "." in text else int(text)
