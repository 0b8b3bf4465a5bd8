"""What must be so after an engine was killed, from what it said before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Words = dict[str, Any]


@dataclass(slots=True)
class Process:
    """A process that was started: its pid inside, if known, and what it may be doing."""

    pid: int | None
    may: set[str | None]
    lines: int = 0


@dataclass(slots=True)
class Box:
    """What one sandbox may be: of each thing the last acknowledged, and one under way."""

    here: set[bool] = field(default_factory=lambda: {False})
    files: dict[str, set[str | None]] = field(default_factory=dict)
    label: set[str | None] = field(default_factory=lambda: {None})
    remembered: set[str] = field(default_factory=lambda: {""})
    processes: dict[str, Process] = field(default_factory=dict)


class Ledger:
    """Listens to one engine after the other, and finds what is not as it was said."""

    def __init__(self) -> None:
        self.boxes: dict[str, Box] = {}
        self.under_way: dict[str, list[str]] = {}
        self.violations: list[str] = []
        self.closing = False
        self.steps = 0

    def box(self, id: str) -> Box:
        return self.boxes.setdefault(id, Box())

    def hear(self, words: Words) -> None:
        """Take one line."""
        match words:
            case {"will": [id, *step]}:
                self.under_way[id] = step
            case {"did": id, "pid": pid}:
                self.steps += 1
                self.apply(id, self.under_way.pop(id), pid=pid, surely=True)
            case {"saw": id}:
                self.check(id, words)
            case {"closing": True, "detach": detach}:
                self.closing = True
                for id in self.boxes if not detach else ():
                    self.apply(id, ["sleep"], surely=False)
            case {"boxes": _}:
                self.check_host(words)
            case {"looked": ids}:
                self.check_missing(ids)

    def crash(self) -> None:
        """The engine was killed: what was under way is done or not, or half."""
        for id, step in self.under_way.items():
            self.apply(id, step, surely=False)
            if self.closing and step[0] == "start":
                # It was broken off: perhaps killed already, and not yet forgotten.
                self.box(id).processes[step[1]].may.add("killed")
        self.under_way.clear()
        self.closing = False

    def agent_killed(self, id: str) -> None:
        """The first process of a sandbox was killed from outside, and all with it."""
        for process in self.box(id).processes.values():
            process.may = (process.may - {"running"}) | {"killed"}

    def apply(self, id: str, step: list[str], *, surely: bool, pid: int | None = None) -> None:
        """A step was done, or perhaps: then what was before may still be."""
        box = self.box(id)
        match step:
            case ["destroy"]:
                box.here.add(False)
                if surely:
                    self.boxes[id] = Box()
                return
            case ["sleep"]:
                for process in box.processes.values():
                    if "running" in process.may:
                        process.may = {"killed"} if surely else {"killed", *process.may}
                return
            case ["write", name, text]:
                box.files[name] = {text} if surely else {text, *box.files.get(name, {None})}
            case ["remember", text]:
                box.remembered = {text} if surely else {text, *box.remembered}
            case ["label", text]:
                box.label = {text} if surely else {text, *box.label}
            case ["start", name]:
                box.processes[name] = Process(pid, {"running"} if surely else {"running", None})
            case ["end", name]:
                process = box.processes[name]
                process.may = {"killed"} if surely else {"killed", *process.may}
        box.here = {True} if surely else {True, *box.here}

    def check_host(self, words: Words) -> None:
        """Everything on disk is in the record, and every cgroup is of a jail that runs."""
        self.expect(set(words["boxes"]) == set(words["keys"]), "directories", words)
        self.expect(not words["unsettled"], "half destroyed", words)
        self.expect(set(words["cgroups"]) <= set(words["active"]), "cgroups", words)

    def check_missing(self, found: list[str]) -> None:
        for id, box in self.boxes.items():
            self.expect((id in found) in box.here, f"{id} here", [box, found])
            if id not in found:
                self.boxes[id] = Box()

    def check(self, id: str, saw: Words) -> None:
        """Compare what an engine found with what may be, and settle what was open."""
        box, before = self.box(id), len(self.violations)
        self.expect(True in box.here, f"{id} is back", saw)
        for name in {*box.files, *saw["files"]}:
            has, may = saw["files"].get(name), box.files.get(name, {None})
            self.expect(has in may, f"{id} file {name}: {has!r}", may)
        self.expect(saw["label"] in box.label, f"{id} label {saw['label']}", box.label)
        self.expect(
            saw["remembered"] in box.remembered,
            f"{id} session: {saw['remembered']!r}",
            box.remembered,
        )
        self.expect(not saw["hanging"], f"{id}: a command outlived its engine", saw["alive"])
        for name in {*box.processes, *saw["processes"]}:
            self.check_process(id, name, box.processes.get(name), saw)
        if len(self.violations) > before:
            self.violations.append(f"{id} is in run {saw['generation']}, after: {saw['last_end']}")
        box.here = {True}
        box.files = {name: {text} for name, text in saw["files"].items()}
        box.label, box.remembered = {saw["label"]}, {saw["remembered"]}

    def check_process(self, id: str, name: str, process: Process | None, saw: Words) -> None:
        found = saw["processes"].get(name)
        if process is None or found is None:
            known = process is not None and None in process.may
            self.expect(known, f"{id} process {name}: {process}", found)
            self.box(id).processes.pop(name, None)
            return
        status, pid = found["status"], found["pid"]
        allowed = process.may | ({"exited", "lost"} if "killed" in process.may else set())
        self.expect(status in allowed, f"{id} process {name}: {status}", process)
        self.expect(process.pid in (None, pid), f"{id} process {name}: pid {pid}", process)
        if status == "running":
            self.expect(pid in saw["alive"], f"{id} process {name} is dead", saw["alive"])
        whole, _, _ = found["log"].rpartition("\n")
        lines = whole.splitlines()
        counted = [str(n) for n in range(len(lines))]
        self.expect(lines == counted, f"{id} log of {name} has a gap", lines[:50])
        self.expect(len(lines) >= process.lines, f"{id} log of {name} was cut", len(lines))
        process.pid, process.may, process.lines = pid, {status}, len(lines)

    def expect(self, so: bool, what: str, seen: object) -> None:
        if not so:
            self.violations.append(f"{what}: {seen}")
