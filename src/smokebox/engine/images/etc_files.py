"""Generated files of /etc: the minimum that programs need, with nothing of the host.

They are in the directory `etc` beside this module. The name server of `resolv.conf` exists only
in a sandbox with egress; without, lookups fail at once. `pam.d/other` is for all services, such as
su, passwd and chfn (which adduser calls): root of a sandbox may become any user. The host's
`openssl.cnf` is not used, because it may name engines, modules and keys.
"""

from __future__ import annotations

import importlib.resources

_DIRECTORY = importlib.resources.files("smokebox.engine.images") / "etc"
_NAMES = (
    "bash.bashrc",
    "environment",
    "group",
    "host.conf",
    "hostname",
    "hosts",
    "login.defs",
    "networks",
    "nsswitch.conf",
    "pam.d/other",
    "passwd",
    "profile",
    "resolv.conf",
    "shells",
    "ssl/openssl.cnf",
    "timezone",
)
# Fedora and openSUSE use another name than Debian.
_ALIASES = {"bashrc": "bash.bashrc"}


def read_etc_file(name: str) -> bytes:
    """Return the content of a generated file by its name below /etc."""
    return _DIRECTORY.joinpath(*name.split("/")).read_bytes()


def generated_etc() -> dict[str, bytes]:
    """Return all generated files by their names below /etc."""
    files = {name: name for name in _NAMES} | _ALIASES
    return {name: read_etc_file(source) for name, source in files.items()}
