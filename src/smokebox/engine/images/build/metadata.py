"""Instructions that change the configuration of an image only, and no files."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.engine.images.build import instructions as dockerfile
from smokebox.engine.images.build.problems import invalid
from smokebox.engine.images.image import Healthcheck, HistoryEntry, ImageConfig

if TYPE_CHECKING:
    from smokebox.engine.images.build.instructions import CommandForm, Instruction
    from smokebox.engine.images.build.variables import Scope

DEFAULT_SHELL = ("/bin/sh", "-c")
_SECOND = 1_000_000_000
_PORTS = re.compile(r"(\d+)(?:-(\d+))?(?:/(tcp|udp|sctp))?", re.IGNORECASE)
_MAX_PORTS = 1000


class ConfigEditor:
    """Applies instructions to the configuration of a stage, in their order."""

    def __init__(self, config: ImageConfig, scope: Scope, file: str) -> None:
        self.config = config
        self._scope = scope
        self._file = file
        self._sets_command = False

    @property
    def shell(self) -> tuple[str, ...]:
        """The shell of commands in shell form."""
        return self.config.shell or DEFAULT_SHELL

    def words(self, command: CommandForm) -> tuple[str, ...]:
        """Return a command as literal words."""
        return (*self.shell, *command.words) if command.shell else command.words

    def apply(self, instruction: Instruction) -> bool:
        """Apply an instruction, and return False if it is none of these."""
        line = instruction.line
        match instruction:
            case dockerfile.Env(pairs=pairs):
                # All values see the environment before the instruction.
                values = {key: self._expand(value, line) for key, value in pairs}
                self._scope.env.update(
                    {self._expand(key, line): value for key, value in values.items()}
                )
                self._change(env=dict(self._scope.env))
            case dockerfile.Label(pairs=pairs):
                labels = {self._expand(k, line): self._expand(v, line) for k, v in pairs}
                self._change(labels={**self.config.labels, **labels})
            case dockerfile.UserInstruction(user=user):
                self._change(user=self._expand(user, line))
            case dockerfile.Shell(words=words):
                self._change(shell=words)
            case dockerfile.Cmd(command=command):
                self._sets_command = True
                self._change(cmd=self.words(command) if command.words else ())
            case dockerfile.Entrypoint(command=command):
                self._change(entrypoint=self.words(command) if command.words else ())
                if not self._sets_command:
                    # The inherited command was written for another entry point.
                    self._change(cmd=None)
            case dockerfile.Expose(ports=ports):
                found = [
                    port
                    for word in ports
                    for text in self._scope.expand_words(word, line)
                    for port in self._ports(text, line)
                ]
                self._change(
                    exposed_ports=tuple(dict.fromkeys((*self.config.exposed_ports, *found)))
                )
            case dockerfile.HealthcheckInstruction():
                self._change(healthcheck=self._healthcheck(instruction))
            case dockerfile.StopSignal(signal=signal):
                self._change(stop_signal=self._expand(signal, line))
            case dockerfile.VolumeInstruction(paths=paths):
                expanded = [self._expand(path, line) for path in paths]
                self._change(volumes=tuple(dict.fromkeys((*self.config.volumes, *expanded))))
            case dockerfile.Maintainer(name=name):
                self._change(author=name)
            case dockerfile.Onbuild(trigger=trigger):
                self._change(onbuild=(*self.config.onbuild, trigger))
            case dockerfile.Arg():
                self._scope.declare(instruction)
            case _:
                return False
        return True

    def set_directory(self, path: str) -> None:
        """Set the working directory."""
        self._change(cwd=path)

    def add_history(self, text: str, *, empty: bool) -> None:
        """Add a step to the history."""
        entry = HistoryEntry(created_by=text, comment="smokebox", empty=empty)
        self._change(history=(*self.config.history, entry))

    def _ports(self, text: str, line: int) -> list[str]:
        found = _PORTS.fullmatch(text)
        if found is None:
            raise invalid(self._file, line, f"{text!r} is not a port", "Write 8080 or 53/udp.")
        first, last = int(found[1]), int(found[2] or found[1])
        if not 0 < first <= last <= 65535 or last - first >= _MAX_PORTS:
            raise invalid(self._file, line, f"{text!r} is not a range of ports", "")
        return [f"{port}/{(found[3] or 'tcp').lower()}" for port in range(first, last + 1)]

    def _healthcheck(self, instruction: dockerfile.HealthcheckInstruction) -> Healthcheck:
        command, times = instruction.command, instruction.times
        if command is None:
            return Healthcheck(test=("NONE",))
        kind = "CMD-SHELL" if command.shell else "CMD"
        return Healthcheck(
            test=(kind, *command.words),
            interval=times.get("interval", 0) / _SECOND,
            timeout=times.get("timeout", 0) / _SECOND,
            start_period=times.get("start-period", 0) / _SECOND,
            retries=times.get("retries", 0),
        )

    def _expand(self, text: str, line: int) -> str:
        return self._scope.expand(text, line)

    def _change(self, **changes: object) -> None:
        self.config = replace(self.config, **changes)  # type: ignore[arg-type]
