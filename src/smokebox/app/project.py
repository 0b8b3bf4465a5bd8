"""A folder of Python files as what an app serves."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from smokebox.agents.loading import load_module
from smokebox.app.needs import check_needs
from smokebox.app.served import (
    ServedAgent,
    ServedFunction,
    served_agent,
    served_workflow,
)
from smokebox.app.settings import AppSettings, load_settings
from smokebox.client.bindings import home
from smokebox.errors import InvalidOption, NotFound, SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from smokebox.agents.agent import Agent
    from smokebox.app.submission import Kind

Served: TypeAlias = ServedAgent | ServedFunction
T = TypeVar("T", bound=Served)

AGENTS, WORKFLOWS, SITE = "agents", "workflows", "app.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """What there is to serve. `faults` are the files that could not be taken in, with why.

    `site` is the user's own ASGI app, from `app.py`.
    """

    folder: Path
    settings: AppSettings
    agents: Mapping[str, Served]
    workflows: Mapping[str, ServedFunction]
    site: Any = None
    faults: Mapping[Path, SmokeboxError]

    def find(self, kind: Kind, name: str) -> Served:
        """What is served by that name. Raises `NotFound`, or the fault of its file."""
        known: Mapping[str, Served] = self.agents if kind == "agent" else self.workflows
        if name in known:
            return known[name]
        for file, fault in self.faults.items():
            if file.stem == name and file.parent.name == f"{kind}s":
                raise fault
        names = ", ".join(sorted(known)) or "none"
        raise NotFound(
            f"there is no {kind} {name!r:.100}.", hint=f"There is: {names}.", kind=kind, name=name
        )

    def name_of(self, agent: Agent | str) -> str:
        """The name by which an agent is served. Raises `NotFound`."""
        if isinstance(agent, str):
            return self.find("agent", agent).name
        for name, served in self.agents.items():
            if isinstance(served, ServedAgent) and _is_of(agent, served):
                return name
        raise NotFound(
            f"the agent {agent.name!r} is in no file of {self.folder / AGENTS}.",
            hint="Write it to a file there, or have it work with init().",
            kind="agent",
            name=agent.name,
        )


def _is_of(agent: Agent, served: ServedAgent) -> bool:
    """Whether an agent is that of a file, which others may have imported by another name."""
    if agent is served.agent or agent is served.defined:
        return True
    file = str(served.file)
    return any(
        any(one is agent for one in vars(module).values())
        for module in list(sys.modules.values())
        if getattr(module, "__file__", None) == file
    )


def load_project(folder: str | Path, *, strict: bool = True) -> Project:
    """Take in a folder. One bad file raises its error, or without `strict` is left out."""
    root = Path(folder).absolute()
    if not root.is_dir():
        raise InvalidOption(
            f"there is no folder {str(folder)!r}.",
            hint="Make a project with `smokebox init NAME`.",
            option=str(folder),
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    # First: what is wrong in it is wrong for all of them.
    settings = load_settings(root)
    faults: dict[Path, SmokeboxError] = {}
    before = home.set(root)
    try:
        agents = _load(root / AGENTS, served_agent, faults)
        workflows = _load(root / WORKFLOWS, served_workflow, faults)
        site = _load_site(root / SITE, faults)
    finally:
        home.reset(before)
    for served in (*agents.values(), *workflows.values()):
        try:
            check_needs(served, root)
        except SmokeboxError as error:
            faults[served.file] = error
    if strict:
        for fault in faults.values():
            raise fault
    if not agents and not workflows and not faults:
        raise InvalidOption(
            f"{root} has no agents/*.py and no workflows/*.py.",
            hint="Make a project with `smokebox init NAME`.",
            option=str(folder),
        )
    return Project(
        folder=root,
        settings=settings,
        agents={name: one for name, one in agents.items() if one.file not in faults},
        workflows={name: one for name, one in workflows.items() if one.file not in faults},
        site=site,
        faults=faults,
    )


def forget_modules(folder: Path) -> None:
    """Have what the project's files import of each other be read anew, too."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).is_relative_to(folder):
            inside = Path(file).relative_to(folder).parts
            if not any(part.startswith(".") or part == "site-packages" for part in inside):
                del sys.modules[name]
    importlib.invalidate_caches()


def files_of(folder: Path) -> list[Path]:
    """The Python files that a project is served from."""
    found = [file for part in (AGENTS, WORKFLOWS) for file in _files(folder / part)]
    return [*found, folder / SITE] if (folder / SITE).is_file() else found


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.py") if not file.name.startswith("_"))


def _load(
    folder: Path, make: Callable[[ModuleType, Path], T], faults: dict[Path, SmokeboxError]
) -> dict[str, T]:
    found: dict[str, T] = {}
    for file in _files(folder):
        try:
            served = make(load_module(file, f"smokebox_{folder.name}_{file.stem}"), file)
        except SmokeboxError as error:
            faults[file] = error
        else:
            found[served.name] = served
    return found


def _load_site(file: Path, faults: dict[Path, SmokeboxError]) -> Any:
    if not file.is_file():
        return None
    try:
        site = getattr(load_module(file, "smokebox_app_site"), "app", None)
        if not callable(site):
            raise InvalidOption(
                f"{file} has no ASGI app named `app`.",
                hint="Write `app = FastAPI()` or `app = Starlette(routes=[...])`.",
                option=str(file),
            )
    except SmokeboxError as error:
        faults[file] = error
        return None
    return site
