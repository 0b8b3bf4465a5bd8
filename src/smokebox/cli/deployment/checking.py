"""What a machine that checks a project runs, one command a line."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.cli.deployment.facts import Facts


def lines(facts: Facts) -> list[str]:
    """Install what the project needs, run its tests, pack it, and try what was packed."""
    needs = " ".join(shlex.quote(one) for one in facts.needs)
    return [
        f"python -m pip install {needs} pytest",
        "python -m pytest",
        "smokebox build --check",
    ]
