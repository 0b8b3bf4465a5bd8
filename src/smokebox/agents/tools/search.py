"""Searches file contents with the programs a sandbox has, and reads what they write."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from smokebox.agents.tools.hits import Hit, Hits
from smokebox.sandbox.globbing import expand_braces

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi

Engine = Literal["rg", "pcre", "ere", "plain"]

TIMEOUT = 60.0
SKIPPED = (".git", "node_modules")

_PROBE = """\
if rg --version >/dev/null; then echo rg
elif echo x | grep -qIP --null x; then echo pcre
elif echo x | grep -qIE --null x; then echo ere
else echo plain; fi 2>/dev/null"""
_PROBE_TIMEOUT = 10.0
_MAX_ERROR_CHARACTERS = 2000
# Characters that mean the same to every program that takes a glob.
_SAFE_GLOB = re.compile(r"[\w.*?-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What to look for; `root` is absolute."""

    pattern: str
    root: str
    include: str | None = None
    literal: bool = False
    ignore_case: bool = False
    context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The first hits in order, and how the search went. `count` is of matches only."""

    hits: list[Hit]
    count: int
    exit_code: int
    errors: str


async def find_engine(sandbox: SandboxApi) -> Engine:
    """The best program for searching that the sandbox has."""
    known = (await sandbox.capabilities()).commands
    if known is not None and "rg" in known:
        return "rg"
    answer = (await sandbox.exec(_PROBE, timeout=_PROBE_TIMEOUT)).stdout.strip()
    engines: dict[str, Engine] = {"rg": "rg", "pcre": "pcre", "plain": "plain"}
    return engines.get(answer, "ere")


async def search(sandbox: SandboxApi, engine: Engine, query: Query) -> Found:
    """Run `query`; what it holds goes to the program as variables, never as shell text."""
    globs = _name_globs(query.include)
    skipped = [name for name in SKIPPED if name not in query.root.split("/")]
    hits = Hits(query.root, include=query.include, skipped=skipped, plain=engine == "plain")
    command = _command(engine, query, skipped, len(globs))
    exit_code, errors = 0, ""
    async with sandbox.exec_stream(
        command, env=_environment(query, globs), timeout=TIMEOUT
    ) as stream:
        async for chunk in stream:
            if chunk.stream == "stderr":
                errors = (errors + chunk.data)[:_MAX_ERROR_CHARACTERS]
            elif not hits.feed(chunk.data):
                break
        else:
            exit_code = stream.exit_code
    return Found(hits=hits.first(), count=hits.count, exit_code=exit_code, errors=errors.strip())


def _command(engine: Engine, query: Query, skipped: list[str], globs: int) -> str:
    words = ["rg" if engine == "rg" else "grep"]
    if engine == "rg":
        words += ["--no-config --hidden --no-heading --color never -nH --null"]
        words += [f'-g "$SMOKEBOX_INCLUDE_{n}"' for n in range(globs)]
        words += [f"-g '!**/{name}/**'" for name in skipped]
    elif engine == "plain":
        words += ["-rnHI"]
    else:
        words += ["-rnHI --null"]
        words += [f'--include="$SMOKEBOX_INCLUDE_{n}"' for n in range(globs)]
        words += [f"--exclude-dir={name}" for name in skipped]
    words += ["-F"] if query.literal else {"rg": [], "pcre": ["-P"]}.get(engine, ["-E"])
    words += ["-i"] * query.ignore_case
    words += [f"-C {query.context}"] * (query.context > 0)
    return " ".join([*words, '-e "$SMOKEBOX_PATTERN" -- "$SMOKEBOX_PATH"'])


def _environment(query: Query, globs: list[str]) -> dict[str, str]:
    values = {f"SMOKEBOX_INCLUDE_{n}": glob for n, glob in enumerate(globs)}
    # In a UTF-8 locale grep passes over lines that are not UTF-8, without a word; only a
    # pattern with letters beyond ASCII needs it, to know them as letters.
    locale = "C" if query.pattern.isascii() else "C.UTF-8"
    named = {"SMOKEBOX_PATTERN": query.pattern, "SMOKEBOX_PATH": query.root, "LC_ALL": locale}
    return {**named, **values}


def _name_globs(include: str | None) -> list[str]:
    """Globs for file names that let through all that `include` does, or none."""
    if include is None:
        return []
    names = [pattern.rsplit("/", 1)[-1] for pattern in expand_braces(include)]
    safe = all(_SAFE_GLOB.fullmatch(name) and name != "**" for name in names)
    return names if safe else []
