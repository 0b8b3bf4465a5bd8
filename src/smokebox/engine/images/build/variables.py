"""Variables of a build: global and stage arguments, the environment, and their expansion."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from e2b_dockerfile_utils import ShellLex

from smokebox.engine.images.build.problems import invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from smokebox.engine.images.build.instructions import Arg, Heredoc
    from smokebox.engine.images.platforms import Platform

PROXIES = frozenset(
    name
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for name in (upper, upper.lower())
)
"""Arguments that need no declaration, reach commands only, and are in no cache key."""


def platform_arguments(platform: Platform, target: str) -> dict[str, str]:
    """Return the arguments that every build has, for a build on and for one platform."""
    values = {
        "PLATFORM": str(platform),
        "OS": platform.os,
        "ARCH": platform.architecture,
        "VARIANT": platform.variant,
    }
    return {
        **{
            f"{side}{name}": value for side in ("TARGET", "BUILD") for name, value in values.items()
        },
        "TARGETSTAGE": target or "default",
    }


class Expander:
    """Expands `$NAME` and `${NAME:-word}` as BuildKit does. Errors name the line."""

    def __init__(self, file: str, escape: str) -> None:
        self.file = file
        self._escape = escape

    def word(self, text: str, values: Mapping[str, str], line: int) -> str:
        """Expand a word, and remove its quotes."""
        lex = ShellLex(self._escape, env=values, skip_unset_env=False)
        with self._errors(line):
            return lex.process_word(text)

    def words(self, text: str, values: Mapping[str, str], line: int) -> tuple[str, ...]:
        """Expand a word that may become several."""
        lex = ShellLex(self._escape, env=values, skip_unset_env=False)
        with self._errors(line):
            return tuple(lex.process_words(text))

    def document(self, heredoc: Heredoc, values: Mapping[str, str], line: int) -> str:
        """Return the content of a heredoc, with variables replaced if its name is not quoted."""
        if not heredoc.expand:
            return heredoc.script
        lex = ShellLex(self._escape, skip_process_quotes=True, env=values, skip_unset_env=False)
        with self._errors(line):
            return lex.process_word(heredoc.script)

    @contextlib.contextmanager
    def _errors(self, line: int) -> Iterator[None]:
        try:
            yield
        except (ValueError, re.error) as error:
            raise invalid(self.file, line, str(error)) from None


class GlobalArguments:
    """The arguments before the first FROM, which FROM may use.

    Args:
        expander: Expands the defaults.
        passed: Values of the caller, by name.
        predefined: Arguments of every build, such as TARGETARCH.
    """

    def __init__(
        self, expander: Expander, passed: Mapping[str, str], predefined: Mapping[str, str]
    ) -> None:
        self.expander = expander
        self.passed = dict(passed)
        self.values = {**predefined, **{k: v for k, v in passed.items() if k in predefined}}
        self.consumed: set[str] = set(predefined) | PROXIES

    def declare(self, arg: Arg) -> None:
        """Add the arguments of an ARG before the first FROM."""
        for name, default in arg.names:
            self.consumed.add(name)
            if name in self.passed:
                self.values[name] = self.passed[name]
            elif default is not None:
                self.values[name] = self.expander.word(default, self.values, arg.line)

    def unused(self) -> list[str]:
        """Return the names of passed arguments that no ARG declared, sorted."""
        return sorted(set(self.passed) - self.consumed)

    def proxies(self) -> dict[str, str]:
        """Return the passed arguments that need no declaration."""
        return {name: value for name, value in self.passed.items() if name in PROXIES}


@dataclass(slots=True, kw_only=True)
class Scope:
    """The variables of one stage. The environment overrides arguments of the same name."""

    outer: GlobalArguments
    env: dict[str, str]
    arguments: dict[str, str] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, str]:
        """Every variable by name, for expansion and for commands."""
        return {**self.arguments, **self.env}

    def declare(self, arg: Arg) -> None:
        """Add the arguments of an ARG. One without a value has that of the global one."""
        for name, default in arg.names:
            self.outer.consumed.add(name)
            if name in self.outer.passed:
                self.arguments[name] = self.outer.passed[name]
            elif default is not None:
                self.arguments[name] = self.expand(default, arg.line)
            elif name in self.outer.values:
                self.arguments[name] = self.outer.values[name]

    def expand(self, text: str, line: int) -> str:
        """Expand one word."""
        return self.outer.expander.word(text, self.values, line)

    def expand_words(self, text: str, line: int) -> tuple[str, ...]:
        """Expand a word that may become several."""
        return self.outer.expander.words(text, self.values, line)

    def expand_document(self, heredoc: Heredoc, line: int) -> str:
        """Expand a heredoc."""
        return self.outer.expander.document(heredoc, self.values, line)
