"""Platforms: the operating system and processor that an image is for."""

from __future__ import annotations

import platform
from dataclasses import dataclass

# The architecture of `uname -m`, as Go and registries name it, and its usual variant.
_MACHINES = {
    "x86_64": ("amd64", ""),
    "aarch64": ("arm64", "v8"),
    "armv7l": ("arm", "v7"),
    "armv6l": ("arm", "v6"),
    "i686": ("386", ""),
}


@dataclass(frozen=True, slots=True)
class Platform:
    """An operating system and a processor, as registries name them."""

    os: str = "linux"
    architecture: str = "amd64"
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


def host_platform() -> Platform:
    """Return the platform of this machine."""
    machine = platform.machine()
    return Platform("linux", *_MACHINES.get(machine, (machine, "")))
