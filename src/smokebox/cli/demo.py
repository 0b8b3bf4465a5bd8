"""`smokebox demo`: a narrated tour of a virtual sandbox, and then the sandbox to type into."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from smokebox.cli.shell.session import Shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to show: what to say, and the command that shows it."""

    say: str
    command: str
    timeout: float | None = None


ORDERS = """\
date,city,item,amount
2031-03-01,Lisbon,lamp,40
2031-03-01,Oslo,chair,120
2031-03-02,Lisbon,desk,310
2031-03-04,Quito,lamp,40
2031-03-05,Oslo,lamp,42
"""

TOUR = (
    Step(
        say="This is a sandbox in memory. Its files came from Python: files={'orders.csv': ...}.",
        command="pwd; ls; head -3 orders.csv",
    ),
    Step(
        say="It speaks bash, with the usual tools, though it starts no process.",
        command="cut -d, -f2 orders.csv | tail -n +2 | sort | uniq -c | sort -rn",
    ),
    Step(
        say="awk, sed, jq, grep, find: what an agent reaches for is there.",
        command="awk -F, 'NR > 1 { sum[$2] += $4 } END { for (c in sum) print c, sum[c] }' "
        "orders.csv | sort | tee totals.txt",
    ),
    Step(
        say="The shell remembers: variables, functions and the directory stay.",
        command="best=$(sort -k2 -n totals.txt | tail -1); mkdir -p report && cd report",
    ),
    Step(
        say="... as one sees in the next command.",
        command='echo "# Best city: $best" > summary.md; pwd; cat summary.md',
    ),
    Step(
        say="A non-zero exit is a result, with bash's own codes: 127 is a missing program.",
        command="apt-get install everything",
    ),
    Step(
        say="The network is off until an allow-list opens it.",
        command="curl https://example.com/",
    ),
    Step(
        say="A runaway script ends at its deadline, with 124. This one has a second.",
        command="while :; do :; done",
        timeout=1,
    ),
    Step(say="The sandbox lives on.", command="cd ..; find . -type f | sort; wc -c totals.txt"),
)


def demo() -> int:
    """Take a tour of a virtual sandbox, and then try it yourself.

    Without a terminal it ends after the tour.
    """
    from smokebox.cli.shell.directory import PersistentDirectory
    from smokebox.cli.shell.session import Shell
    from smokebox.sandbox.virtual import virtual

    sandbox = virtual(files={"orders.csv": ORDERS})
    with Shell(sandbox, PersistentDirectory("virtual", sandbox)) as shell:
        for step in TOUR:
            _show(shell, step)
        if sys.stdin.isatty():
            typer.secho("\nIt is yours: type a command.", fg="cyan")
            shell.interact()
    return 0


def _show(shell: Shell, step: Step) -> None:
    typer.secho(f"\n{step.say}", fg="cyan")
    typer.secho(f"$ {step.command}", bold=True)
    code = shell.run(step.command, timeout=step.timeout)
    if code:
        typer.secho(f"(exit code {code})", fg="yellow")
