"""The commands Smokebox adds to the virtual shell, one file each.

They fill what the engine leaves out or cuts short; what works there is left there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.egress.policy import Egress
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
from smokebox.sandbox.virtual.guarded import Guarded

if TYPE_CHECKING:
    from smokebox.sandbox.network import Network
    from smokebox.sandbox.virtual.command import Command


def own_commands(policy: Network | Egress | None) -> dict[str, Command]:
    """Every command of ours, for a sandbox with this network."""
    network = Guarded(policy) if isinstance(policy, Egress) else policy
    return {
        "csplit": csplit,
        "curl": curl_on(network),
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
        "wget": wget_on(network),
        "yes": yes,
        "zcat": zcat,
    }


def absent_commands(network: Network | Egress | None) -> frozenset[str]:
    """Those that are there only to say why they are not."""
    return frozenset({"git"} if network is not None else {"git", "curl", "wget"})
