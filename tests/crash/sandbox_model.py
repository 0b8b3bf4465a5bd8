"""Expected state of sandboxes after their engine was killed, from its reports before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Report = dict[str, Any]


@dataclass(slots=True)
class ProcessModel:
    """A started process: its pid inside, if known, and its possible states."""

    pid: int | None
    states: set[str | None]
    lines: int = 0


@dataclass(slots=True)
class PossibleState:
    """Possible values of a sandbox: the last acknowledged ones, and those of a step in progress."""

    exists: set[bool] = field(default_factory=lambda: {False})
    files: dict[str, set[str | None]] = field(default_factory=dict)
    label: set[str | None] = field(default_factory=lambda: {None})
    variable: set[str] = field(default_factory=lambda: {""})
    processes: dict[str, ProcessModel] = field(default_factory=dict)


class SandboxModel:
    """Follows the reports of successive engines, and collects violations."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, PossibleState] = {}
        self.in_progress: dict[str, list[str]] = {}
        self.violations: list[str] = []
        self.closing = False
        self.steps = 0

    def state(self, id: str) -> PossibleState:
        return self.sandboxes.setdefault(id, PossibleState())

    def apply_report(self, report: Report) -> None:
        """Apply one report of an engine."""
        match report:
            case {"started": [id, *step]}:
                self.in_progress[id] = step
            case {"finished": id, "pid": pid}:
                self.steps += 1
                self.apply(id, self.in_progress.pop(id), certain=True, pid=pid)
            case {"found": id}:
                self.check(id, report)
            case {"closing": True, "detach": detach}:
                self.closing = True
                for id in self.sandboxes if not detach else ():
                    self.apply(id, ["sleep"], certain=False)
            case {"directories": _}:
                self.check_host(report)
            case {"inspected": ids}:
                self.check_missing(ids)

    def crash(self) -> None:
        """Record the kill of the engine: steps in progress may have happened or not."""
        for id, step in self.in_progress.items():
            self.apply(id, step, certain=False)
            if self.closing and step[0] == "start":
                # The step was aborted: its process may be killed but still recorded.
                self.state(id).processes[step[1]].states.add("killed")
        self.in_progress.clear()
        self.closing = False

    def guest_init_killed(self, id: str) -> None:
        """Record the kill of a guest init, which ends all processes of its sandbox."""
        for process in self.state(id).processes.values():
            process.states = (process.states - {"running"}) | {"killed"}

    def apply(self, id: str, step: list[str], *, certain: bool, pid: int | None = None) -> None:
        """Apply a step; if it is not certain, the state before it remains possible."""
        state = self.state(id)
        match step:
            case ["destroy"]:
                state.exists.add(False)
                if certain:
                    self.sandboxes[id] = PossibleState()
                return
            case ["sleep"]:
                for process in state.processes.values():
                    if "running" in process.states:
                        process.states = {"killed"} if certain else {"killed", *process.states}
                return
            case ["write", name, text]:
                state.files[name] = {text} if certain else {text, *state.files.get(name, {None})}
            case ["set", text]:
                state.variable = {text} if certain else {text, *state.variable}
            case ["label", text]:
                state.label = {text} if certain else {text, *state.label}
            case ["start", name]:
                state.processes[name] = ProcessModel(
                    pid, {"running"} if certain else {"running", None}
                )
            case ["end", name]:
                process = state.processes[name]
                process.states = {"killed"} if certain else {"killed", *process.states}
        state.exists = {True} if certain else {True, *state.exists}

    def check_host(self, report: Report) -> None:
        """Check that directories are in the record, and cgroups belong to running jails."""
        self.expect(set(report["directories"]) == set(report["keys"]), "directories", report)
        self.expect(not report["destroying"], "half destroyed", report)
        self.expect(set(report["cgroups"]) <= set(report["active"]), "cgroups", report)

    def check_missing(self, found: list[str]) -> None:
        for id, state in self.sandboxes.items():
            self.expect((id in found) in state.exists, f"{id} exists", [state, found])
            if id not in found:
                self.sandboxes[id] = PossibleState()

    def check(self, id: str, found: Report) -> None:
        """Compare the state that an engine found with the possible ones, and adopt it."""
        state, before = self.state(id), len(self.violations)
        self.expect(True in state.exists, f"{id} was destroyed", found)
        for name in {*state.files, *found["files"]}:
            value, possible = found["files"].get(name), state.files.get(name, {None})
            self.expect(value in possible, f"{id} file {name}: {value!r}", possible)
        self.expect(found["label"] in state.label, f"{id} label {found['label']}", state.label)
        self.expect(
            found["variable"] in state.variable,
            f"{id} session: {found['variable']!r}",
            state.variable,
        )
        self.expect(not found["hanging"], f"{id}: a command outlived its engine", found["alive"])
        for name in {*state.processes, *found["processes"]}:
            self.check_process(id, name, state.processes.get(name), found)
        if len(self.violations) > before:
            self.violations.append(
                f"{id} has generation {found['generation']}, after: {found['stop_reason']}"
            )
        state.exists = {True}
        state.files = {name: {text} for name, text in found["files"].items()}
        state.label, state.variable = {found["label"]}, {found["variable"]}

    def check_process(
        self, id: str, name: str, process: ProcessModel | None, found: Report
    ) -> None:
        actual = found["processes"].get(name)
        if process is None or actual is None:
            known = process is not None and None in process.states
            self.expect(known, f"{id} process {name}: {process}", actual)
            self.state(id).processes.pop(name, None)
            return
        status, pid = actual["status"], actual["pid"]
        allowed = process.states | ({"exited", "lost"} if "killed" in process.states else set())
        self.expect(status in allowed, f"{id} process {name}: {status}", process)
        self.expect(process.pid in (None, pid), f"{id} process {name}: pid {pid}", process)
        if status == "running":
            self.expect(pid in found["alive"], f"{id} process {name} is dead", found["alive"])
        lines = actual["log"].rpartition("\n")[0].splitlines()
        expected = [str(n) for n in range(len(lines))]
        self.expect(lines == expected, f"{id} log of {name} has a gap", lines[:50])
        self.expect(len(lines) >= process.lines, f"{id} log of {name} was cut", len(lines))
        process.pid, process.states, process.lines = pid, {status}, len(lines)

    def expect(self, condition: bool, what: str, details: object) -> None:
        if not condition:
            self.violations.append(f"{what}: {details}")
