"""The package mirrors that the host is configured for, as environment of RUN.

They are in no layer and no key of the cache. Settings with a password in them, and those that name
files of the host, are left out.
"""

from __future__ import annotations

import configparser
import os
import re
import urllib.parse
from pathlib import Path

_PIP_FILES = ("/etc/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf")
_PIP = {
    "index-url": "PIP_INDEX_URL",
    "extra-index-url": "PIP_EXTRA_INDEX_URL",
    "trusted-host": "PIP_TRUSTED_HOST",
}
_NPM_FILES = ("/etc/npmrc", "/usr/etc/npmrc", "/usr/local/etc/npmrc", "~/.npmrc")
_NPM_VARIABLE = "npm_config_registry"
_NPM_REGISTRY = re.compile(r"^\s*registry\s*=\s*(\S+)", re.MULTILINE)


def read_mirrors() -> dict[str, str]:
    """Return variables for pip and npm that name the mirrors of this host."""
    variables = _pip()
    # npm reads both spellings.
    registry = os.environ.get("NPM_CONFIG_REGISTRY") or os.environ.get(_NPM_VARIABLE) or _npm()
    if registry and _is_plain(registry):
        variables[_NPM_VARIABLE] = registry
    return variables


def _pip() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in (*_PIP_FILES, os.environ.get("PIP_CONFIG_FILE", "")):
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(os.path.expanduser(path), encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError, OSError):
            continue
        for option, variable in _PIP.items():
            if parser.has_option("global", option):
                found[variable] = " ".join(parser.get("global", option).split())
    found.update({name: os.environ[name] for name in _PIP.values() if os.environ.get(name)})
    return {
        name: " ".join(words)
        for name, value in found.items()
        if (
            words := [
                one for one in value.split() if name == _PIP["trusted-host"] or _is_plain(one)
            ]
        )
    }


def _npm() -> str:
    registry = ""
    for path in _NPM_FILES:
        try:
            text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if names := _NPM_REGISTRY.findall(text):
            registry = names[-1]
    return registry


def _is_plain(url: str) -> bool:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme in ("http", "https") and parts.username is None
