"""IPython syntax: translated by IPython if the image has it, else only `!` and `%pip`.

Nothing of IPython is loaded before code needs or imports it.
"""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SYNTAX = re.compile(r"^\s*(?:[!%?]|[\w.]+\s*=\s*[!%])|\?\s*$", re.MULTILINE)
_SHELL = re.compile(r"^(\s*)!(.*)$")
_PIP = re.compile(r"^(\s*)%pip\s(.*)$")


class Magics:
    """Translates IPython syntax to Python. `show` is called with bundles to display."""

    def __init__(self, module: Any, show: Callable[[dict[str, Any]], None]) -> None:
        self._module = module
        self._show = show
        self._shell: Any = None

    def translate(self, code: str) -> str | None:
        """Return the translation of code that is not valid Python; None if there is none."""
        if not _SYNTAX.search(code):
            return None
        try:
            import_module("IPython")
        except ImportError:
            translated = "\n".join(map(_translate_line, code.split("\n")))
        else:
            translated = str(self.shell().transform_cell(code))
        return None if translated == code else translated

    def shell(self) -> Any:
        """Return the IPython shell, which shares the namespace of the code."""
        if self._shell is None:
            self._shell = self._create_shell()
            builtins.get_ipython = lambda: self._shell  # type: ignore[attr-defined]
        return self._shell

    def _create_shell(self) -> Any:
        core, show = "IPython.core", self._show
        publisher = import_module(f"{core}.displaypub").DisplayPublisher
        hook = import_module(f"{core}.displayhook").DisplayHook
        interactive = import_module(f"{core}.interactiveshell").InteractiveShell
        config = import_module("traitlets.config").Config()
        # Its history would be a database in the home directory.
        config.HistoryManager.enabled = False
        config.InteractiveShell.colors = "NoColor"
        shell = interactive.instance(
            config=config,
            user_module=self._module,
            user_ns=vars(self._module),
            display_pub_class=type(
                "Publisher", (publisher,), {"publish": lambda _, data, *__, **___: show(data)}
            ),
            displayhook_class=type(
                "Hook",
                (hook,),
                {
                    "write_output_prompt": lambda _: None,
                    "write_format_data": lambda _, data, *__: show(data),
                    "finish_displayhook": lambda _: None,
                },
            ),
        )
        shell.system = run
        return shell


def run(command: str) -> None:
    """Run a shell command with the stdout and stderr of the code."""
    code = subprocess.call(command, shell=True)
    if code:
        print(f"exit code {code}", file=sys.stderr)  # noqa: T201


def _translate_line(line: str) -> str:
    for pattern, prefix in ((_SHELL, ""), (_PIP, f"{sys.executable} -m pip ")):
        found = pattern.match(line)
        if found:
            return (
                f"{found[1]}__import__({__name__!r}, fromlist=['run']).run({prefix + found[2]!r})"
            )
    return line
