"""Arguments and options shared by commands, and the parsing of their values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from smokebox import isolation
from smokebox.cli.completion import complete_sandboxes
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from smokebox.client.settings import SandboxSettings

Id = Annotated[
    str, typer.Argument(metavar="ID", help="Sandbox ID.", autocompletion=complete_sandboxes)
]
Ids = Annotated[
    list[str],
    typer.Argument(metavar="ID...", help="Sandbox IDs.", autocompletion=complete_sandboxes),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Command = Annotated[
    list[str],
    typer.Argument(
        metavar="COMMAND...", help="Program and arguments; a single word is run by bash."
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        "-t",
        metavar="SECONDS",
        help="Kill the command after this time (exit code 124).",
    ),
]
Stdin = Annotated[bool, typer.Option("--stdin", "-i", help="Pass standard input to the command.")]
Create = Annotated[bool, typer.Option("--create", help="Create the sandbox if it does not exist.")]
Image = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Image to create it from: a reference, a Dockerfile's path, oci:DIR, archive:FILE.",
    ),
]
Mirrors = Annotated[
    bool,
    typer.Option(
        "--mirrors", help="Use the package mirrors of the server's host where the image is built."
    ),
]
Limits = Annotated[
    str | None,
    typer.Option(
        metavar="LIMITS", help="Instance type (lite, basic, ...) or memory=512MiB,cpu=0.5,pids=64."
    ),
]
Label = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="Set a label. Repeatable.")
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        "--env", "-e", metavar="NAME=VALUE", help="Set an environment variable. Repeatable."
    ),
]
Cwd = Annotated[str | None, typer.Option("--cwd", "-w", metavar="DIR", help="Working directory.")]
User = Annotated[str | None, typer.Option("--user", "-u", metavar="NAME", help="User to run as.")]
Tier = Annotated[isolation.Tier | None, typer.Option(help="Isolation tier.")]

Egress = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOST|FIELD=VALUE",
        help="Allow a host, or set a field of the egress policy: internet=true, tcp=db.test:5432."
        " Repeatable.",
    ),
]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def subcommands(help: str) -> typer.Typer:
    """Return a group of subcommands."""
    return typer.Typer(help=help, rich_markup_mode=None, add_completion=False, no_args_is_help=True)


def settings_of(
    *,
    image: str | None = None,
    tier: str | None = None,
    limits: str | None = None,
    label: list[str] | None = None,
    env: list[str] | None = None,
    sleep_after: str | None = None,
    ephemeral: bool = False,
    keep_alive: bool = False,
    lifetime: str | None = None,
    checkpoints: str | None = None,
    cwd: str | None = None,
    user: str | None = None,
    egress: list[str] | None = None,
    mirrors: bool = False,
) -> SandboxSettings:
    """Convert options of the command line to settings of the SDK."""
    from smokebox.client.settings import SandboxSettings

    return SandboxSettings(
        image=image,
        tier=tier,
        limits=parse_limits(limits),
        env=parse_pairs("--env", env),
        labels=parse_pairs("--label", label),
        sleep_after=None if sleep_after is None else parse_duration("--sleep-after", sleep_after),
        keep_alive=keep_alive or None,
        lifetime=None if lifetime is None else parse_duration("--lifetime", lifetime),
        ephemeral=ephemeral or None,
        checkpoints=parse_checkpoints(checkpoints),
        cwd=cwd,
        user=user,
        egress=parse_egress_words(egress),
        mirrors=mirrors or None,
    )


def parse_pairs(option: str, texts: list[str] | None) -> dict[str, str] | None:
    """Parse NAME=VALUE texts; None if there are none."""
    if not texts:
        return None
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidOption(
                f"{option} takes NAME=VALUE, not {text!r}.",
                hint=f"Pass for example {option} NAME=VALUE; repeat it for more.",
                option=option,
                value=text,
            )
        pairs[name] = value
    return pairs


def parse_egress_words(words: list[str] | None) -> dict[str, object] | None:
    """Return the policy of HOST and FIELD=VALUE words, by the fields of `Egress`.

    Words without a field are allowed hosts. Lists grow with each word; a table takes
    FIELD=NAME=VALUE.
    """
    if not words:
        return None
    from smokebox.egress.policy import egress_fields
    from smokebox.options import refuse_unknown

    defaults = {one.name: one for one in egress_fields()}
    policy: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            name, value = "allowed_hosts", word
        refuse_unknown("--egress", [name], defaults)
        kind = str(defaults[name].type)
        if kind.startswith("Sequence"):
            hosts = policy.setdefault(name, [])
            assert isinstance(hosts, list)
            hosts += value.split(",")
        elif kind.startswith("Mapping"):
            table = policy.setdefault(name, {})
            assert isinstance(table, dict)
            table |= parse_pairs(f"--egress {name}", [value]) or {}
        elif kind == "bool" and value in ("true", "false"):
            policy[name] = value == "true"
        elif kind.startswith(("int", "float")) and _NUMBER.fullmatch(value):
            policy[name] = float(value) if "." in value else int(value)
        else:
            policy[name] = value
    return policy


def parse_limits(text: str | None) -> str | dict[str, float | str | None] | None:
    """Parse `memory=1GiB,cpu=2`; the name of an instance type is returned unchanged."""
    if text is None or "=" not in text:
        return text
    pairs = parse_pairs("--limits", text.split(",")) or {}
    return {name: _parse_limit(value) for name, value in pairs.items()}


def parse_checkpoints(text: str | None) -> bool | dict[str, object] | None:
    """Parse `10m`, `10m,keep_last=24,keep_for=7d` or `off`."""
    if text is None or text == "off":
        return None if text is None else False
    every, *rest = text.split(",")
    fields: dict[str, object] = {"every": parse_duration("--checkpoints", every)}
    for name, value in (parse_pairs("--checkpoints", rest) or {}).items():
        fields[name] = int(value) if value.isdecimal() else value
    return fields


def parse_duration(option: str, text: str) -> float:
    """Return the seconds of text such as `90`, `30s`, `10m`, `2h`, `30d` or `4w`."""
    match = _DURATION.fullmatch(text)
    if match is None or not float(match[1]):
        raise InvalidOption(
            f"{option} takes a duration, not {text!r}.",
            hint=f"Pass for example {option} 30s, 10m, 2h or 30d.",
            option=option,
            value=text,
        )
    return float(match[1]) * _SECONDS[match[2]]


def parse_command(words: list[str]) -> str | list[str]:
    """Return a single word as a line for bash, several as a program with arguments."""
    return words[0] if len(words) == 1 else words


def parse_forward(text: str) -> tuple[int, int]:
    """Return the local and the remote port of `8080:3000`; a single port is used for both."""
    local, colon, remote = text.partition(":")
    ports = (local, remote if colon else local)
    if not all(port.isascii() and port.isdigit() and int(port) < 65536 for port in ports):
        raise InvalidOption(
            f"{text!r} is not [LOCAL:]PORT.",
            hint="Pass for example 8080:3000 to reach port 3000 of the sandbox at local port 8080.",
            option="ports",
            value=text,
        )
    if int(ports[1]) == 0:
        raise InvalidOption(
            f"{text!r} forwards to port 0, which does not exist.",
            hint="Pass a sandbox port from 1 to 65535; the local port may be 0 for any free one.",
            option="ports",
            value=text,
        )
    return int(ports[0]), int(ports[1])


def _parse_limit(text: str) -> float | str | None:
    if text in ("none", ""):
        return None
    if not _NUMBER.fullmatch(text):
        return text
    return float(text) if "." in text else int(text)
