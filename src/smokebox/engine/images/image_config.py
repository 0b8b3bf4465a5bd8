"""The configuration of an image: its JSON in config blobs, which is untrusted."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.engine.images.json_fields import Fields, damaged

if TYPE_CHECKING:
    from collections.abc import Sequence

DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")

_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthcheck:
    """A command that tells if a program of an image works. Times are in seconds, 0 for default."""

    test: tuple[str, ...] = ()
    interval: float = 0.0
    timeout: float = 0.0
    start_period: float = 0.0
    retries: int = 0

    def to_json(self) -> dict[str, object]:
        """Return it as in a config blob."""
        times = {
            "Interval": self.interval,
            "Timeout": self.timeout,
            "StartPeriod": self.start_period,
        }
        document: dict[str, object] = {"Test": list(self.test)}
        document |= {name: round(value * _NANOSECONDS) for name, value in times.items() if value}
        return document | ({"Retries": self.retries} if self.retries else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """A step that an image was made by. An `empty` one added no layer."""

    created: str = ""
    created_by: str = ""
    author: str = ""
    comment: str = ""
    empty: bool = False

    def to_json(self) -> dict[str, object]:
        """Return it as in a config blob."""
        texts = {
            "created": self.created,
            "created_by": self.created_by,
            "author": self.author,
            "comment": self.comment,
        }
        document: dict[str, object] = {name: text for name, text in texts.items() if text}
        return document | ({"empty_layer": True} if self.empty else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """The configuration of an image, as the OCI image specification and Docker define it.

    An empty `cwd` or `user` means the default. `entrypoint`, `cmd` and `shell` are None where the
    image sets none. `created` and `author` are texts of the image's maker.
    """

    env: dict[str, str] = field(default_factory=dict)
    cwd: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    shell: tuple[str, ...] | None = None
    exposed_ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    stop_signal: str = ""
    healthcheck: Healthcheck | None = None
    onbuild: tuple[str, ...] = ()
    architecture: str = ""
    os: str = "linux"
    variant: str = ""
    created: str = ""
    author: str = ""
    history: tuple[HistoryEntry, ...] = ()

    @classmethod
    def from_oci(cls, document: object) -> ImageConfig:
        """Parse the JSON of a config blob; `diff_ids` returns the layers in it.

        Raises:
            ImageError: The document is not a valid configuration.
        """
        top = Fields(document, "config")
        config = top.fields("config")
        return cls(
            env=_parse_env(config),
            cwd=_parse_cwd(config.text("WorkingDir")),
            user=config.text("User"),
            entrypoint=config.texts("Entrypoint"),
            cmd=config.texts("Cmd"),
            shell=config.texts("Shell"),
            exposed_ports=tuple(sorted(config.fields("ExposedPorts").values)),
            volumes=tuple(sorted(config.fields("Volumes").values)),
            labels=config.dictionary("Labels"),
            stop_signal=config.text("StopSignal"),
            healthcheck=_parse_healthcheck(config.fields("Healthcheck")),
            onbuild=config.texts("OnBuild") or (),
            architecture=top.text("architecture"),
            os=top.text("os") or "linux",
            variant=top.text("variant"),
            created=top.text("created"),
            author=top.text("author"),
            history=tuple(_parse_history(one) for one in top.objects("history")),
        )

    def to_oci(self, diff_ids: Sequence[str] = ()) -> dict[str, object]:
        """Return the JSON of the config blob of an image with these layers, the lowest first."""
        document = {
            "created": self.created,
            "author": self.author,
            "architecture": self.architecture,
            "variant": self.variant,
            "os": self.os,
        }
        return {
            **{name: text for name, text in document.items() if text},
            "config": self._settings(),
            "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
            "history": [one.to_json() for one in self.history],
        }

    def _settings(self) -> dict[str, object]:
        lists = {"Entrypoint": self.entrypoint, "Cmd": self.cmd, "Shell": self.shell}
        settings: dict[str, object] = {
            "User": self.user,
            "ExposedPorts": {name: {} for name in self.exposed_ports},
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "Volumes": {name: {} for name in self.volumes},
            "WorkingDir": self.cwd,
            "Labels": self.labels,
            "StopSignal": self.stop_signal,
            "OnBuild": list(self.onbuild),
        }
        present: dict[str, object] = {name: value for name, value in settings.items() if value}
        # An empty list differs from none: it removes what the base image sets.
        present |= {name: list(words) for name, words in lists.items() if words is not None}
        if self.healthcheck is not None:
            present["Healthcheck"] = self.healthcheck.to_json()
        return present


def diff_ids(document: object) -> tuple[str, ...]:
    """Return the digests of the unpacked layers that a config blob names, the lowest first.

    Raises:
        ImageError: The document has no valid list of them.
    """
    rootfs = Fields(document, "config").fields("rootfs")
    found = rootfs.texts("diff_ids") or ()
    if not all(DIGEST.fullmatch(one) for one in found):
        raise damaged("config.rootfs.diff_ids", "a list of digests")
    return found


def _parse_env(config: Fields) -> dict[str, str]:
    env: dict[str, str] = {}
    for line in config.texts("Env") or ():
        name, _, value = line.partition("=")
        if not name:
            raise damaged("config.config.Env", "a list of NAME=value")
        env[name] = value
    return env


def _parse_cwd(path: str) -> str:
    # A relative one is below the root, as in Docker.
    return path if not path or path.startswith("/") else f"/{path}"


def _parse_healthcheck(check: Fields) -> Healthcheck | None:
    if not check.values:
        return None
    return Healthcheck(
        test=check.texts("Test") or (),
        interval=check.number("Interval") / _NANOSECONDS,
        timeout=check.number("Timeout") / _NANOSECONDS,
        start_period=check.number("StartPeriod") / _NANOSECONDS,
        retries=check.number("Retries"),
    )


def _parse_history(entry: Fields) -> HistoryEntry:
    return HistoryEntry(
        created=entry.text("created"),
        created_by=entry.text("created_by"),
        author=entry.text("author"),
        comment=entry.text("comment"),
        empty=entry.values.get("empty_layer") is True,
    )
