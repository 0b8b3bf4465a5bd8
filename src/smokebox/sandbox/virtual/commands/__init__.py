"""Commands that Smokebox adds to the virtual shell, one file each.

They replace commands that the engine lacks or implements only in part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.sandbox.virtual.commands.csplit import csplit
from smokebox.sandbox.virtual.commands.curl import curl_on
from smokebox.sandbox.virtual.commands.date import date
from smokebox.sandbox.virtual.commands.diff import diff
from smokebox.sandbox.virtual.commands.git import git
from smokebox.sandbox.virtual.commands.html_to_markdown import html_to_markdown
from smokebox.sandbox.virtual.commands.ls import ls
from smokebox.sandbox.virtual.commands.seq import seq
from smokebox.sandbox.virtual.commands.sleep import sleep
from smokebox.sandbox.virtual.commands.stat import stat
from smokebox.sandbox.virtual.commands.touch import touch
from smokebox.sandbox.virtual.commands.wget import wget_on
from smokebox.sandbox.virtual.commands.yes import yes
from smokebox.sandbox.virtual.commands.zcat import zcat
from smokebox.sandbox.virtual.fetch import EgressClient

if TYPE_CHECKING:
    from smokebox.egress.policy import Egress
    from smokebox.sandbox.virtual.command import Command


def own_commands(egress: Egress | None) -> dict[str, Command]:
    """Return our commands for a sandbox with this policy."""
    client = None if egress is None else EgressClient(egress)
    return {
        "csplit": csplit,
        "curl": curl_on(client),
        "date": date,
        "diff": diff,
        "dir": ls,
        "git": git,
        "gzcat": zcat,
        "html-to-markdown": html_to_markdown,
        "ls": ls,
        "seq": seq,
        "sleep": sleep,
        "stat": stat,
        "touch": touch,
        "vdir": ls,
        "wget": wget_on(client),
        "yes": yes,
        "zcat": zcat,
    }


def absent_commands(egress: Egress | None) -> frozenset[str]:
    """Return the commands that exist only to explain why they are missing."""
    return frozenset({"git"} if egress is not None else {"git", "curl", "wget"})
