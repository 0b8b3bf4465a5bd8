"""`smokebox doctor`: what this machine can do, and the command that mends what it cannot."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

_COLOURS = {"ok": "green", "missing": "red", "optional": "yellow"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> int:
    """Say what this machine can do, and how to mend what it cannot.

    Exits with 0 when everything Smokebox requires is there, and with 1 otherwise.
    """
    from smokebox.cli.checks import check_machine

    failed = False
    found = []
    for check in check_machine():
        failed = failed or check.status == "missing"
        found.append(asdict(check))
        if not as_json:
            typer.secho(f"{check.status:<9}", fg=_COLOURS[check.status], nl=False)
            typer.echo(f"{check.name:<17} {check.detail}")
            if check.mend:
                typer.echo(f"{'':<9}{'':<17} mend: {check.mend}")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    return int(failed)
