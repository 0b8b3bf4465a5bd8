"""The grep tool: finds lines in files by a regular expression."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from smokebox.agents.tools.files import as_given
from smokebox.agents.tools.glob import matches
from smokebox.agents.tools.output import MAX_LINE_BYTES, fitting_lines, one_line, shorten_line
from smokebox.agents.tools.tool import Tool, ToolResult, failure
from smokebox.errors import PathError
from smokebox.sandbox.globbing import expand_braces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.sandbox.api import SandboxApi


MAX_MATCHES = 100
# Past this many a search is stopped: the model will narrow it anyway.
MAX_COUNTED = 10_000

_MAX_RECORD = 8192
_MAX_KEPT = 5000
_RECORD = re.compile(r"([^\0]*)\0(\d+)([:-])(.*)", re.DOTALL)
_PLAIN_RECORD = re.compile(r"(.+?)[:-](\d+)([:-])(.*)")
# Lines between the records, which have no NUL of their own and stick to the next name.
_NOISE = re.compile(
    r"(?:--\n|[^\n]*(?:stopped searching binary file|binary file matches)[^\n]*\n)+"
)


@dataclass(frozen=True, slots=True, order=True)
class Hit:
    """A line that was found, or where `is_match` is false one beside it."""

    path: str
    line: int
    is_match: bool
    text: str


class Hits:
    """Counts matches, and keeps the first in the order of path and line.

    `plain` is for a grep that cannot put a NUL after the name, where a name that looks
    like `a:1:b` is misread.
    """

    def __init__(
        self, root: str, *, include: str | None, skipped: Sequence[str], plain: bool
    ) -> None:
        self.count = 0
        self._root = root.rstrip("/")
        self._skipped = frozenset(skipped)
        self._negated = include is not None and include.startswith("!")
        self._patterns = [] if include is None else expand_braces(include.removeprefix("!"))
        self._plain = plain
        self._buffer = ""
        self._cut = False
        self._kept: list[Hit] = []
        # Lines of one file come together, so the last answer is nearly always the next one.
        self._wanted = functools.lru_cache(maxsize=8)(self._is_wanted)

    def feed(self, text: str) -> bool:
        """Take the next piece of output; False when there is no point in more."""
        if self._cut:
            # We are in a line longer than anything we would show: go on at its end.
            if "\n" not in text:
                return True
            text = text[text.find("\n") :]
        self._buffer += text
        position = 0
        while self.count <= MAX_COUNTED and (end := self._end_of_record(position)) >= 0:
            self._take(self._buffer[position:end])
            position = end + 1
        rest = self._buffer[position:]
        self._buffer, self._cut = rest[:_MAX_RECORD], len(rest) > _MAX_RECORD
        return self.count <= MAX_COUNTED

    def first(self) -> list[Hit]:
        """The hits up to the hundredth match, after the last piece."""
        if self._buffer:
            self.feed("\n")
        self._prune()
        return self._kept

    def _end_of_record(self, start: int) -> int:
        # A name may hold line breaks: a record ends at the first one after its NUL.
        start = start if self._plain else self._buffer.find("\0", start)
        return self._buffer.find("\n", start) if start >= 0 else -1

    def _take(self, record: str) -> None:
        parsed = (_PLAIN_RECORD if self._plain else _RECORD).fullmatch(record)
        if parsed is None:
            return
        path, line, sign, text = parsed.groups()
        noise = _NOISE.match(path)
        path = path[noise.end() :] if noise else path
        if not self._wanted(path):
            return
        text = shorten_line(text.removesuffix("\r"))
        self.count += sign == ":"
        self._kept.append(Hit(path, int(line), sign == ":", text))
        if len(self._kept) > _MAX_KEPT:
            self._prune()

    def _is_wanted(self, path: str) -> bool:
        relative = path[len(self._root) :].lstrip("/") or path.rsplit("/", 1)[-1]
        if not self._skipped.isdisjoint(relative.split("/")):
            return False
        if not self._patterns:
            return True
        return self._negated != any(matches(pattern, relative) for pattern in self._patterns)

    def _prune(self) -> None:
        self._kept.sort()
        seen = 0
        for index, hit in enumerate(self._kept):
            seen += hit.is_match
            if seen > MAX_MATCHES:
                del self._kept[index:]
                break


SearchProgram = Literal["rg", "pcre", "ere", "plain"]

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
class SearchQuery:
    """What to look for; `root` is absolute."""

    pattern: str
    root: str
    include: str | None = None
    literal: bool = False
    ignore_case: bool = False
    context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The first hits in order, and how the search went. `count` is of matches only."""

    hits: list[Hit]
    count: int
    exit_code: int
    errors: str


async def find_search_program(sandbox: SandboxApi) -> SearchProgram:
    """The best program for searching that the sandbox has."""
    known = (await sandbox.capabilities()).commands
    if known is not None and "rg" in known:
        return "rg"
    answer = (await sandbox.exec(_PROBE, timeout=_PROBE_TIMEOUT)).stdout.strip()
    engines: dict[str, SearchProgram] = {"rg": "rg", "pcre": "pcre", "plain": "plain"}
    return engines.get(answer, "ere")


async def search(sandbox: SandboxApi, engine: SearchProgram, query: SearchQuery) -> SearchResult:
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
    return SearchResult(
        hits=hits.first(), count=hits.count, exit_code=exit_code, errors=errors.strip()
    )


def _command(engine: SearchProgram, query: SearchQuery, skipped: list[str], globs: int) -> str:
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


def _environment(query: SearchQuery, globs: list[str]) -> dict[str, str]:
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


MAX_CONTEXT = 10
# Linux lets one environment variable have 128 KiB.
MAX_PATTERN_BYTES = 64 * 1024

DESCRIPTION = f"""\
Search the contents of files for a regular expression, line by line. Gives `path:line:text`, \
at most {MAX_MATCHES} matches, lines cut at {MAX_LINE_BYTES} bytes. Hidden files are searched; \
binary files, .git and node_modules are not, nor, where ripgrep is installed, what .gitignore \
names. Name such a directory as path to search in it."""

PARAMETERS = {
    "type": "object",
    "properties": {
        "pattern": {
            "type": "string",
            "minLength": 1,
            "description": "Regular expression, for example `def \\w+_tool`.",
        },
        "path": {
            "type": "string",
            "description": "File or directory to search. Default: the working directory.",
        },
        "include": {
            "type": "string",
            "minLength": 1,
            "description": "Only files that match this glob: `*.py`, `src/**/*.{ts,tsx}`, `!*.md`.",
        },
        "literal": {
            "type": "boolean",
            "description": "Take the pattern as plain text. Default false.",
        },
        "ignore_case": {"type": "boolean", "description": "Default false."},
        "context": {
            "type": "integer",
            "minimum": 0,
            "maximum": MAX_CONTEXT,
            "description": "Lines to show before and after each match. Default 0.",
        },
    },
    "required": ["pattern"],
    "additionalProperties": False,
}


def grep_tool(sandbox: SandboxApi) -> Tool:
    """`grep`, over `sandbox`. Looks once which programs the sandbox has."""
    engine: SearchProgram | None = None

    async def grep(
        pattern: str,
        path: str = ".",
        include: str | None = None,
        literal: bool = False,
        ignore_case: bool = False,
        context: int = 0,
    ) -> ToolResult:
        nonlocal engine
        if fault := _fault(pattern):
            return failure(fault)
        info = await sandbox.stat(path)
        if not (info.is_file or info.is_directory):
            raise PathError(path, f"neither a file nor a directory: {path}.")
        engine = engine or await find_search_program(sandbox)
        query = SearchQuery(
            pattern=pattern,
            root=sandbox.resolve_path(path),
            include=include,
            literal=literal,
            ignore_case=ignore_case,
            context=context,
        )
        found = await search(sandbox, engine, query)
        return _answer(found, _lines(sandbox, path, found.hits, separated=context > 0))

    return Tool(name="grep", description=DESCRIPTION, parameters=PARAMETERS, function=grep)


def _fault(pattern: str) -> str:
    if "\n" in pattern:
        return (
            "pattern holds a line break, and grep goes line by line. "
            "Search for one of the lines, or write \\n-free alternatives with |."
        )
    if "\0" in pattern:
        return "pattern holds a NUL character. Text files have none: remove it."
    if len(pattern.encode()) > MAX_PATTERN_BYTES:
        return f"pattern has more than {MAX_PATTERN_BYTES} bytes. Search for a part of it."
    return ""


def _lines(sandbox: SandboxApi, path: str, hits: list[Hit], *, separated: bool) -> list[str]:
    """One for each hit; where there is context, a gap is marked as grep does."""
    written = as_given(sandbox, path)
    lines: list[str] = []
    for before, hit in zip([None, *hits], hits, strict=False):
        follows = before is None or (before.path, before.line + 1) == (hit.path, hit.line)
        gap = "--\n" if separated and not follows else ""
        sign = ":" if hit.is_match else "-"
        name = one_line(written(hit.path))
        lines.append(f"{gap}{name}{sign}{hit.line}{sign}{hit.text}")
    return lines


def _answer(found: SearchResult, lines: list[str]) -> ToolResult:
    trouble = _trouble(found)
    if not lines:
        return failure(trouble) if trouble else ToolResult(text="No matches found.")
    shown = fitting_lines(lines, len(lines))
    matches = sum(hit.is_match for hit in found.hits[:shown])
    text = "\n".join(lines[:shown])
    if matches < found.count:
        count = f"more than {MAX_COUNTED}" if found.count > MAX_COUNTED else found.count
        text += f"\n\n[Showing {matches} of {count} matches. Narrow the pattern or path.]"
    return ToolResult(text=f"{text}\n\n[{trouble}]" if trouble else text)


def _trouble(found: SearchResult) -> str:
    """What kept the search from being whole; 0 and 1 are grep's codes for all is well."""
    if found.exit_code <= 1:
        return ""
    if found.exit_code == 124:
        return f"The search was stopped after {TIMEOUT:g} seconds. Narrow the path or include."
    return found.errors or f"The search ended with exit code {found.exit_code}."
