"""The grep tool: searches files with ripgrep or grep, whichever the sandbox has."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from smokebox.agents.tools.files import path_formatter
from smokebox.agents.tools.glob import matches
from smokebox.agents.tools.output import MAX_LINE_BYTES, count_fitting, one_line, shorten_line
from smokebox.agents.tools.tool import Tool, ToolResult, failure
from smokebox.errors import PathError
from smokebox.sandbox.glob import expand_braces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.sandbox.api import SandboxApi


MAX_MATCHES = 100
# The search stops after this many.
MAX_COUNTED = 10_000

_MAX_RECORD = 8192
_MAX_HITS = 5000
_RECORD = re.compile(r"([^\0]*)\0(\d+)([:-])(.*)", re.DOTALL)
_PLAIN_RECORD = re.compile(r"(.+?)[:-](\d+)([:-])(.*)")
# Lines between records. They have no NUL, so that the next path starts with them.
_NOISE = re.compile(
    r"(?:--\n|[^\n]*(?:stopped searching binary file|binary file matches)[^\n]*\n)+"
)


@dataclass(frozen=True, slots=True, order=True)
class Hit:
    """A line that matches, or with `is_match` false a line of context."""

    path: str
    line: int
    is_match: bool
    text: str


class HitParser:
    """Parses the output of a search, counts matches, and keeps the first by path and line.

    `plain` is for a grep without `--null`: a path such as `a:1:b` is then misread.
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
        self._truncated = False
        self._hits: list[Hit] = []
        # Lines of one file arrive together.
        self._included = functools.lru_cache(maxsize=8)(self._is_included)

    def feed(self, text: str) -> bool:
        """Parse more output; return False if the search can be stopped."""
        if self._truncated:
            # Inside a line longer than what is shown: continue at its end.
            if "\n" not in text:
                return True
            text = text[text.find("\n") :]
        self._buffer += text
        position = 0
        while self.count <= MAX_COUNTED and (end := self._end_of_record(position)) >= 0:
            self._parse(self._buffer[position:end])
            position = end + 1
        rest = self._buffer[position:]
        self._buffer, self._truncated = rest[:_MAX_RECORD], len(rest) > _MAX_RECORD
        return self.count <= MAX_COUNTED

    def finish(self) -> list[Hit]:
        """Return the hits up to the last match that is shown."""
        if self._buffer:
            self.feed("\n")
        self._prune()
        return self._hits

    def _end_of_record(self, start: int) -> int:
        # A path may contain line breaks: a record ends at the first one after its NUL.
        start = start if self._plain else self._buffer.find("\0", start)
        return self._buffer.find("\n", start) if start >= 0 else -1

    def _parse(self, record: str) -> None:
        parsed = (_PLAIN_RECORD if self._plain else _RECORD).fullmatch(record)
        if parsed is None:
            return
        path, line, sign, text = parsed.groups()
        noise = _NOISE.match(path)
        path = path[noise.end() :] if noise else path
        if not self._included(path):
            return
        text = shorten_line(text.removesuffix("\r"))
        self.count += sign == ":"
        self._hits.append(Hit(path, int(line), sign == ":", text))
        if len(self._hits) > _MAX_HITS:
            self._prune()

    def _is_included(self, path: str) -> bool:
        relative = path[len(self._root) :].lstrip("/") or path.rsplit("/", 1)[-1]
        if not self._skipped.isdisjoint(relative.split("/")):
            return False
        if not self._patterns:
            return True
        return self._negated != any(matches(pattern, relative) for pattern in self._patterns)

    def _prune(self) -> None:
        self._hits.sort()
        count = 0
        for index, hit in enumerate(self._hits):
            count += hit.is_match
            if count > MAX_MATCHES:
                del self._hits[index:]
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
# Characters that mean the same to rg and to grep.
_SAFE_GLOB = re.compile(r"[\w.*?-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrepQuery:
    """Arguments of a search; `root` is absolute."""

    pattern: str
    root: str
    include: str | None = None
    literal: bool = False
    ignore_case: bool = False
    context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrepResult:
    """The first hits in order, the number of matches, and the exit of the program."""

    hits: list[Hit]
    count: int
    exit_code: int
    errors: str


async def find_search_program(sandbox: SandboxApi) -> SearchProgram:
    """Return the best search program that the sandbox has."""
    known = (await sandbox.capabilities()).commands
    if known is not None and "rg" in known:
        return "rg"
    output = (await sandbox.exec(_PROBE, timeout=_PROBE_TIMEOUT)).stdout.strip()
    programs: dict[str, SearchProgram] = {"rg": "rg", "pcre": "pcre", "plain": "plain"}
    return programs.get(output, "ere")


async def search(sandbox: SandboxApi, program: SearchProgram, query: GrepQuery) -> GrepResult:
    """Run a search. Its values are passed as environment variables, never as shell text."""
    globs = _name_globs(query.include)
    skipped = [name for name in SKIPPED if name not in query.root.split("/")]
    parser = HitParser(query.root, include=query.include, skipped=skipped, plain=program == "plain")
    command = _command(program, query, skipped, len(globs))
    exit_code, errors = 0, ""
    async with sandbox.exec_stream(
        command, env=_environment(query, globs), timeout=TIMEOUT
    ) as stream:
        async for chunk in stream:
            if chunk.stream == "stderr":
                errors = (errors + chunk.data)[:_MAX_ERROR_CHARACTERS]
            elif not parser.feed(chunk.data):
                break
        else:
            exit_code = stream.exit_code
    return GrepResult(
        hits=parser.finish(), count=parser.count, exit_code=exit_code, errors=errors.strip()
    )


def _command(program: SearchProgram, query: GrepQuery, skipped: list[str], globs: int) -> str:
    words = ["rg" if program == "rg" else "grep"]
    if program == "rg":
        words += ["--no-config --hidden --no-heading --color never -nH --null"]
        words += [f'-g "$SMOKEBOX_INCLUDE_{n}"' for n in range(globs)]
        words += [f"-g '!**/{name}/**'" for name in skipped]
    elif program == "plain":
        words += ["-rnHI"]
    else:
        words += ["-rnHI --null"]
        words += [f'--include="$SMOKEBOX_INCLUDE_{n}"' for n in range(globs)]
        words += [f"--exclude-dir={name}" for name in skipped]
    words += ["-F"] if query.literal else {"rg": [], "pcre": ["-P"]}.get(program, ["-E"])
    words += ["-i"] * query.ignore_case
    words += [f"-C {query.context}"] * (query.context > 0)
    return " ".join([*words, '-e "$SMOKEBOX_PATTERN" -- "$SMOKEBOX_PATH"'])


def _environment(query: GrepQuery, globs: list[str]) -> dict[str, str]:
    return {
        "SMOKEBOX_PATTERN": query.pattern,
        "SMOKEBOX_PATH": query.root,
        # In a UTF-8 locale grep silently skips lines that are not UTF-8; only a pattern with
        # characters beyond ASCII needs that locale.
        "LC_ALL": "C" if query.pattern.isascii() else "C.UTF-8",
        **{f"SMOKEBOX_INCLUDE_{n}": glob for n, glob in enumerate(globs)},
    }


def _name_globs(include: str | None) -> list[str]:
    """Return globs of file names that match at least what `include` does; empty if unsafe."""
    if include is None:
        return []
    names = [pattern.rsplit("/", 1)[-1] for pattern in expand_braces(include)]
    safe = all(_SAFE_GLOB.fullmatch(name) and name != "**" for name in names)
    return names if safe else []


MAX_CONTEXT = 10
# Linux limits an environment variable to 128 KiB.
MAX_PATTERN_BYTES = 64 * 1024

DESCRIPTION = f"""\
Search the contents of files for a regular expression, line by line. Returns `path:line:text`, \
at most {MAX_MATCHES} matches, lines cut at {MAX_LINE_BYTES} bytes. Hidden files are searched; \
binary files, .git and node_modules are not, nor, if ripgrep is installed, files in .gitignore. \
Pass such a directory as path to search it."""

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
            "description": "Treat the pattern as plain text. Default false.",
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
    """Return the tool `grep` for a sandbox, whose search program is looked up once."""
    program: SearchProgram | None = None

    async def grep(
        pattern: str,
        path: str = ".",
        include: str | None = None,
        literal: bool = False,
        ignore_case: bool = False,
        context: int = 0,
    ) -> ToolResult:
        nonlocal program
        if problem := _pattern_problem(pattern):
            return failure(problem)
        info = await sandbox.stat(path)
        if not (info.is_file or info.is_directory):
            raise PathError(path, f"neither a file nor a directory: {path}.")
        program = program or await find_search_program(sandbox)
        query = GrepQuery(
            pattern=pattern,
            root=sandbox.resolve_path(path),
            include=include,
            literal=literal,
            ignore_case=ignore_case,
            context=context,
        )
        found = await search(sandbox, program, query)
        return _result(found, _lines(sandbox, path, found.hits, separated=context > 0))

    return Tool(name="grep", description=DESCRIPTION, parameters=PARAMETERS, function=grep)


def _pattern_problem(pattern: str) -> str:
    if "\n" in pattern:
        return (
            "pattern has a line break, and grep searches line by line. "
            "Search for one of the lines, or write alternatives with |."
        )
    if "\0" in pattern:
        return "pattern has a NUL character. Text files have none: remove it."
    if len(pattern.encode()) > MAX_PATTERN_BYTES:
        return f"pattern has more than {MAX_PATTERN_BYTES} bytes. Search for a part of it."
    return ""


def _lines(sandbox: SandboxApi, path: str, hits: list[Hit], *, separated: bool) -> list[str]:
    """Return a line for each hit; with `separated`, `--` marks gaps as grep does."""
    format_path = path_formatter(sandbox, path)
    lines: list[str] = []
    for before, hit in zip([None, *hits], hits, strict=False):
        follows = before is None or (before.path, before.line + 1) == (hit.path, hit.line)
        gap = "--\n" if separated and not follows else ""
        sign = ":" if hit.is_match else "-"
        name = one_line(format_path(hit.path))
        lines.append(f"{gap}{name}{sign}{hit.line}{sign}{hit.text}")
    return lines


def _result(found: GrepResult, lines: list[str]) -> ToolResult:
    problem = _search_problem(found)
    if not lines:
        return failure(problem) if problem else ToolResult(text="No matches found.")
    shown = count_fitting(lines, len(lines))
    matches = sum(hit.is_match for hit in found.hits[:shown])
    text = "\n".join(lines[:shown])
    if matches < found.count:
        count = f"more than {MAX_COUNTED}" if found.count > MAX_COUNTED else found.count
        text += f"\n\n[Showing {matches} of {count} matches. Narrow the pattern or path.]"
    return ToolResult(text=f"{text}\n\n[{problem}]" if problem else text)


def _search_problem(found: GrepResult) -> str:
    """Return why the search is incomplete, or ""; grep exits with 0 or 1 on success."""
    if found.exit_code <= 1:
        return ""
    if found.exit_code == 124:
        return f"The search was stopped after {TIMEOUT:g} seconds. Narrow the path or include."
    return found.errors or f"The search ended with exit code {found.exit_code}."
