"""Verbs that end with somebody else's command line, which is left as it is."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class Trailing(TyperCommand):
    """A verb whose own options stop where the command begins, with or without `--`.

    `smokebox exec box -w /tmp ls -la` gives `-la` to ls. Its last argument is the command,
    and what is before it are words of its own, such as the id.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `--` before the first word of the command."""
        return super().parse_args(ctx, self._marked(args))

    def _marked(self, args: list[str]) -> list[str]:
        own = sum(param.param_type_name == "argument" for param in self.params) - 1
        takes_value = {
            name
            for param in self.params
            if param.param_type_name == "option" and not getattr(param, "is_flag", False)
            for name in param.opts
        }
        at = 0
        while at < len(args):
            word = args[at]
            if word == "--":
                return args
            if word in takes_value:
                at += 2
            elif word.startswith("-") and len(word) > 1:
                at += 1
            elif own:
                own -= 1
                at += 1
            else:
                return [*args[:at], "--", *args[at:]]
        return args
