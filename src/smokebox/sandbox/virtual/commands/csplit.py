"""`csplit`: split a file at lines and patterns."""

from __future__ import annotations

import functools
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.errors import PathError
from smokebox.sandbox.virtual.command import CommandOutput, describe
from smokebox.sandbox.virtual.commands.arguments import Arguments, UsageError, failure, parse

if TYPE_CHECKING:
    from smokebox.sandbox.virtual.command import CommandCall

_LONG = {
    "prefix=": "f", "suffix-format=": "b", "digits=": "n", "quiet": "s", "silent": "s",
    "keep-files": "k", "elide-empty-files": "z", "suppress-matched": "m",
}  # fmt: skip
_PATTERN = re.compile(r"([/%])((?:\\.|[^\\])*?)\1([+-]?\d+)?")
_REPEAT = re.compile(r"\{(\d+|\*)\}")
_SUFFIX = re.compile(r"(?:[^%]|%%)*%[-+ 0#']*\d*(?:\.\d+)?[diuxXo](?:[^%]|%%)*")
_MAX_FILES = 100_000
_MAX_SECONDS = 10.0
# Character classes of POSIX basic regular expressions.
_CLASSES = {
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z",
    "space": r"\s", "blank": r" \t", "punct": r"!-/:-@\[-`{-~", "xdigit": "0-9A-Fa-f",
}  # fmt: skip
_MAX_STEPS = 10**8
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\[:\w+:\]|[^\]])*\]|.", re.DOTALL)


@dataclass(slots=True)
class _Cutter:
    lines: list[str]
    suppress: bool
    place: int = 0
    # The search continues after the line matched last.
    sought: int = 0
    pieces: list[list[str]] = field(default_factory=list)

    def cut(self, end: int, *, keep: bool = True, matched: bool = False) -> None:
        if keep:
            self.pieces.append(self.lines[self.place : end])
        self.place = end + (1 if matched and self.suppress else 0)
        self.sought = max(self.sought, self.place)


def csplit(call: CommandCall) -> CommandOutput:
    """Write the pieces to files xx00, xx01, ..., and print their sizes."""
    try:
        arguments = parse(call.args, "f:b:n:skqz", _LONG)
        if len(arguments.operands) < 2:
            raise UsageError("missing operand")
        digits = arguments.last("n") or "2"
        suffix = arguments.last("b") or f"%0{digits}d"
        if not digits.isdigit() or not _SUFFIX.fullmatch(suffix):
            raise UsageError("invalid format of the suffix")
    except UsageError as error:
        return failure("csplit", str(error))
    source, *patterns = arguments.operands
    try:
        text = (
            call.stdin
            if source == "-"
            else call.read_file(source).decode("utf-8", "surrogateescape")
        )
    except PathError as error:
        reason = describe(error).rpartition(": ")[2]
        return failure("csplit", f"cannot open '{source}' for reading: {reason}")
    cutter = _Cutter(re.findall(r"[^\n]*\n|[^\n]+", text), arguments.has("m"))
    problem = ""
    try:
        _cut_all(cutter, patterns)
        cutter.cut(len(cutter.lines))
    except UsageError as error:
        problem = str(error)
        cutter.cut(len(cutter.lines))
    return _write(call, arguments, cutter.pieces, suffix, problem)


def _cut_all(cutter: _Cutter, patterns: list[str]) -> None:
    words = list(patterns)
    while words:
        word = words.pop(0)
        repeat = _REPEAT.fullmatch(words[0]) if words else None
        if repeat:
            words.pop(0)
        forever = repeat is not None and repeat[1] == "*"
        times = 1 + (int(repeat[1]) if repeat and not forever else 0)
        for turn in range(_MAX_FILES if forever else times):
            if not _cut_once(cutter, word, turn, forever):
                break


def _cut_once(cutter: _Cutter, word: str, turn: int, forever: bool) -> bool:
    if word.isdigit():
        return _cut_at_line(cutter, word, int(word) * (turn + 1), turn)
    match = _PATTERN.fullmatch(word)
    if not match:
        raise UsageError(f"'{word}': invalid pattern")
    offset = int(match[3] or 0)
    pattern = _compile_basic(match[2])
    deadline = time.monotonic() + _MAX_SECONDS
    for number in range(max(cutter.place, cutter.sought), len(cutter.lines)):
        if time.monotonic() > deadline:
            raise UsageError(f"'{word}': the search takes too long")
        if pattern.is_in(cutter.lines[number].rstrip("\n")):
            cutter.sought = number + 1
            end = number + offset
            if not cutter.place <= end <= len(cutter.lines):
                raise UsageError(f"'{word}': line number out of range")
            cutter.cut(end, keep=match[1] == "/", matched=True)
            return True
    if forever:
        return False
    raise UsageError(f"'{word}': match not found" + (f" on repetition {turn}" if turn else ""))


def _cut_at_line(cutter: _Cutter, word: str, line: int, turn: int) -> bool:
    if line == 0:
        raise UsageError(f"{word}: line number must be greater than zero")
    if line - 1 >= len(cutter.lines) or line - 1 < cutter.place:
        again = f" on repetition {turn}" if turn else ""
        raise UsageError(f"'{word}': line number out of range{again}")
    cutter.cut(line - 1, matched=True)
    return True


def _write(
    call: CommandCall, arguments: Arguments, pieces: list[list[str]], suffix: str, problem: str
) -> CommandOutput:
    texts = ["".join(piece).encode("utf-8", "surrogateescape") for piece in pieces]
    if arguments.has("z"):
        texts = [text for text in texts if text]
    sizes = "" if arguments.has("s", "q") else "".join(f"{len(text)}\n" for text in texts)
    if not problem or arguments.has("k"):
        prefix = arguments.last("f") or "xx"
        for number, text in enumerate(texts):
            call.files.write(call.path(prefix + suffix % number), text)
    stderr = f"csplit: {problem}\n" if problem else ""
    return CommandOutput(stdout=sizes, stderr=stderr, exit_code=1 if problem else 0)


@dataclass(frozen=True, slots=True)
class _BasicPattern:
    """Compiled pattern with a limit of its cost.

    Python's matcher backtracks: with `n` repeats, a line costs its length to the power of `n + 1`,
    and a match cannot be interrupted.
    """

    text: str
    compiled: re.Pattern[str]
    repeats: int

    def is_in(self, line: str) -> bool:
        """Return whether it matches somewhere in the line."""
        if len(line) ** (self.repeats + 1) > _MAX_STEPS and self.repeats:
            raise UsageError(
                f"'{self.text}': too many repeats for a line of {len(line)} characters"
            )
        return self.compiled.search(line) is not None


@functools.lru_cache(maxsize=128)
def _compile_basic(text: str) -> _BasicPattern:
    """Compile a POSIX basic regular expression.

    Raises:
        UsageError: It is invalid or repeats a group.
    """
    parts = [_translated(token, n == 0) for n, token in enumerate(_TOKEN.findall(text))]
    source = "".join(parts)
    if re.search(r"(?<!\\)\)[*+?{]", source):
        raise UsageError(f"'{text}': repeated groups are not supported")
    try:
        return _BasicPattern(text, re.compile(source), sum(p in ("*", "+", "{") for p in parts))
    except re.error:
        raise UsageError(f"'{text}': invalid regular expression") from None


def _translated(token: str, first: bool) -> str:
    if token.startswith("[") and len(token) > 1:
        return _bracket(token)
    if token.startswith("\\"):
        return token[1] if token[1] in "(){}+?|" else token
    if token == "*" and first:
        return r"\*"
    return f"\\{token}" if token in "(){}+?|" else token


def _bracket(token: str) -> str:
    inner = re.sub(
        r"\[:(\w+):\]", lambda m: _CLASSES.get(m[1], ""), token[1:-1].replace("\\", r"\\")
    )
    negated = inner.startswith("^")
    inner = inner[1:] if negated else inner
    inner = inner.replace("[", r"\[") if "[" in inner and r"\[" not in inner else inner
    return f"[{'^' if negated else ''}{inner.replace(']', chr(92) + ']')}]"
