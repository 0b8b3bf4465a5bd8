"""Loads agents from Python files."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox.agents.agent import Agent
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from types import ModuleType


NAME = "agent"


def load_agent(file: str | Path) -> Agent:
    """Return the agent of a Python file: the one named `agent`, or the only one in it."""
    path = Path(file)
    return pick_agent(load_module(path), path)


def pick_agent(module: ModuleType, path: Path) -> Agent:
    """Return the agent of a module that was loaded from `path`."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, Agent)}
    if NAME in found:
        return found[NAME]
    agents = list({id(agent): agent for agent in found.values()}.values())
    if len(agents) == 1:
        return agents[0]
    if not agents:
        raise InvalidOption(
            f"{path} has no agent.",
            hint="Write `agent = create_agent(model=...)` at its top level.",
            option=str(path),
        )
    raise InvalidOption(
        f"{path} has several agents: {', '.join(sorted(found))}.",
        hint=f"Name one of them `{NAME}`.",
        option=str(path),
    )


def load_module(path: Path, name: str | None = None) -> ModuleType:
    """Import a Python file, with its directory on `sys.path` so that it can import its siblings.

    Without a `name` the file is the only one, and its directory comes first on `sys.path`. With
    one it is one of several, and its directory comes last, so that it hides no other module.

    Raises:
        InvalidOption: The file does not exist, or failed at the line that the error names.
    """
    spec, first = None, name is None
    if path.suffix == ".py" and path.is_file():
        name = name or f"smokebox_file_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise InvalidOption(
            f"there is no Python file {str(path)!r}.",
            hint="Pass the path of a file such as agent.py.",
            option=str(path),
        )
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent.absolute())
    if folder not in sys.path:
        sys.path.insert(0 if first else len(sys.path), folder)
    # Dataclasses and pydantic models resolve their annotations through sys.modules.
    before, sys.modules[spec.name] = sys.modules.get(spec.name), module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        _restore_module(spec.name, before)
        raise InvalidOption(
            f"{path}{_line(error, path)}: {type(error).__name__}: {error}",
            hint="Fix that line and try again.",
            option=str(path),
        ) from error
    return module


def _restore_module(name: str, module: ModuleType | None) -> None:
    if module is None:
        del sys.modules[name]
    else:
        sys.modules[name] = module


def _line(error: BaseException, path: Path) -> str:
    """Return `, line N`: the innermost line of `path` in the traceback, or ""."""
    here = str(path.absolute())
    if isinstance(error, SyntaxError) and error.filename == here:
        return f", line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == here]
    return f", line {lines[-1]}" if lines else ""
