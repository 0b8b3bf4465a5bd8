"""Project of an app: the agents and workflows in a folder of Python files."""

from __future__ import annotations

import base64
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from smokebox.agents.agent_file import load_module
from smokebox.app.definitions import ServedAgent, ServedFunction, define_agent, define_workflow
from smokebox.app.settings import AppSettings, load_settings
from smokebox.app.source_file import env_names, source_location
from smokebox.client.bindings import Environment
from smokebox.errors import InvalidOption, NotFound, SmokeboxError
from smokebox.project import project_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from smokebox.agents.agent import Agent
    from smokebox.app.inbox import TargetKind

Served: TypeAlias = ServedAgent | ServedFunction
T = TypeVar("T", bound=Served)

AGENTS, WORKFLOWS, SITE = "agents", "workflows", "app.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppProject:
    """Agents and workflows of a folder.

    `site` is the user's ASGI app, from `app.py`. `faults` has the errors of files that could not
    be loaded.
    """

    folder: Path
    settings: AppSettings
    agents: Mapping[str, Served]
    workflows: Mapping[str, ServedFunction]
    site: Any = None
    faults: Mapping[Path, SmokeboxError]

    def find(self, kind: TargetKind, name: str) -> Served:
        """Return an agent or workflow by name. Raises `NotFound`, or the error of its file."""
        known: Mapping[str, Served] = self.agents if kind == "agent" else self.workflows
        if name in known:
            return known[name]
        for file, fault in self.faults.items():
            if file.stem == name and file.parent.name == f"{kind}s":
                raise fault
        names = ", ".join(sorted(known)) or "none"
        raise NotFound(
            f"there is no {kind} {name!r:.100}.", hint=f"Known: {names}.", kind=kind, name=name
        )

    def name_of(self, agent: Agent | str) -> str:
        """Return the name under which an agent is served. Raises `NotFound`."""
        if isinstance(agent, str):
            return self.find("agent", agent).name
        for name, served in self.agents.items():
            if isinstance(served, ServedAgent) and _is_defined_by(agent, served):
                return name
        raise NotFound(
            f"the agent {agent.name!r} is in no file of {self.folder / AGENTS}.",
            hint="Define it in a file there, or use it with init().",
            kind="agent",
            name=agent.name,
        )


def _is_defined_by(agent: Agent, served: ServedAgent) -> bool:
    """Return whether the agent comes from that file, which may be imported under another name."""
    if agent is served.agent or agent is served.defined:
        return True
    file = str(served.file)
    return any(
        any(one is agent for one in vars(module).values())
        for module in list(sys.modules.values())
        if getattr(module, "__file__", None) == file
    )


def load_project(folder: str | Path, *, strict: bool = True) -> AppProject:
    """Load a folder. An invalid file raises its error; without `strict` it is skipped."""
    root = Path(folder).absolute()
    if not root.is_dir():
        raise InvalidOption(
            f"there is no folder {str(folder)!r}.",
            hint="Create a project with `smokebox init NAME`.",
            option=str(folder),
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    # Loaded first: an error in it affects every file.
    settings = load_settings(root)
    faults: dict[Path, SmokeboxError] = {}
    before = project_folder.set(root)
    try:
        agents = _load(root / AGENTS, define_agent, faults)
        workflows = _load(root / WORKFLOWS, define_workflow, faults)
        site = _load_site(root / SITE, faults)
    finally:
        project_folder.reset(before)
    for served in (*agents.values(), *workflows.values()):
        try:
            check_environment(served, root)
        except SmokeboxError as error:
            faults[served.file] = error
    if strict:
        for fault in faults.values():
            raise fault
    if not agents and not workflows and not faults:
        raise InvalidOption(
            f"{root} has no agents/*.py and no workflows/*.py.",
            hint="Create a project with `smokebox init NAME`.",
            option=str(folder),
        )
    return AppProject(
        folder=root,
        settings=settings,
        agents={name: one for name, one in agents.items() if one.file not in faults},
        workflows={name: one for name, one in workflows.items() if one.file not in faults},
        site=site,
        faults=faults,
    )


def unload_modules(folder: Path) -> None:
    """Remove the project's modules from `sys.modules`, so that imported files are reloaded too."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).is_relative_to(folder):
            parts = Path(file).relative_to(folder).parts
            if not any(part.startswith(".") or part == "site-packages" for part in parts):
                del sys.modules[name]
    importlib.invalidate_caches()


def files_of(folder: Path) -> list[Path]:
    """List the Python files that a project is served from."""
    found = [file for part in (AGENTS, WORKFLOWS) for file in _files(folder / part)]
    return [*found, folder / SITE] if (folder / SITE).is_file() else found


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.py") if not file.name.startswith("_"))


def _load(
    folder: Path, define: Callable[[ModuleType, Path], T], faults: dict[Path, SmokeboxError]
) -> dict[str, T]:
    found: dict[str, T] = {}
    for file in _files(folder):
        try:
            served = define(load_module(file, f"smokebox_{folder.name}_{file.stem}"), file)
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


def check_environment(served: ServedAgent | ServedFunction, folder: Path) -> None:
    """Raise `InvalidOption`, with file and line, for a missing binding or secret."""
    env = Environment(folder)
    for name, line in env_names(served.file).items():
        _look_up(env, name, f"{served.file}, line {line}")
    signature = served.trigger.signature
    if signature is not None:
        where = source_location(served.file, "triggers")
        secret = str(_look_up(env, signature.secret, where))
        if signature.preset == "standard" and not _is_base64(secret.removeprefix("whsec_")):
            raise InvalidOption(
                f"{where}: the secret {signature.secret} is not base64.",
                hint="Copy it as the sender shows it: whsec_...",
                option=signature.secret,
            )


def _look_up(env: Environment, name: str, where: str) -> object:
    try:
        value: object = getattr(env, name)
    except AttributeError:
        return None
    except SmokeboxError as error:
        raise InvalidOption(f"{where}: {error.message}", hint=error.hint, option=name) from None
    return value


def _is_base64(text: str) -> bool:
    try:
        return bool(base64.b64decode(text, validate=True))
    except ValueError:
        return False
