"""Bindings: the sandboxes, buckets and secrets that a project names, as attributes of `env`.

    [sandboxes.PyBox]
    class_name = "PyBoxSandbox"
    image = "./docker/python.Dockerfile"
    limits = "lite"

    [buckets.KNOWLEDGE_BASE]
    bucket = "my-knowledge-base"
    endpoint = "https://s3.example.com"

With this in `smokebox.toml` or pyproject.toml, `from smokebox import env` gives
`get_sandbox(env.PyBox, "user-42")` and `get_virtual_sandbox(env.KNOWLEDGE_BASE)`. Any other name
is a secret of the environment or of `.env`: `bearer(env.GITHUB_TOKEN)`.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smokebox.client.settings import parse_settings
from smokebox.egress.policy import moved_options
from smokebox.errors import InvalidOption
from smokebox.project import CONFIG_FILE, CREDENTIALS, PYPROJECT, ProjectConfig, load_config

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.client.settings import ClientSettings
    from smokebox.sandbox.bucket import BucketBinding

_CLASS_NAME = "class_name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A kind of sandbox by name, with the settings of its sandboxes.

    `class_name` is that of a subclass of `Sandbox`, whose settings and egress handlers they have
    too; empty for none.
    """

    name: str
    settings: ClientSettings
    file: str
    class_name: str = ""


class Environment:
    """Names of a project by attribute: `env.PyBox`. The files are read at each access.

    A sandbox is a `Binding`, a bucket a `BucketBinding`, and a secret a str.

    Args:
        folder: Directory of the project or below it. Defaults to the working directory.
    """

    __name__ = "env"

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        config = load_config(self._folder)
        sandboxes = sandbox_bindings(config)
        if name in sandboxes:
            return sandboxes[name]
        if name in config.buckets:
            return bucket_binding(config, name)
        secret = config.secrets.get(name)
        if secret is not None:
            return secret
        # Kinds of sandboxes are spelled like classes, secrets like constants.
        raise config.secrets.missing(name) if name.isupper() else _unknown(config, name)

    def get(self, name: str) -> str | None:
        """Return a secret; None when it is not set."""
        return load_config(self._folder).secrets.get(name)

    def __dir__(self) -> list[str]:
        config = load_config(self._folder)
        return sorted([*config.sandboxes, *config.buckets])


def sandbox_bindings(config: ProjectConfig) -> dict[str, Binding]:
    """Parse the settings of every sandbox that a project names.

    Raises:
        InvalidOption: One of them has an unknown or invalid setting.
    """
    bindings: dict[str, Binding] = {}
    for name, settings in config.sandboxes.items():
        moved = moved_options("{name} in the table [sandboxes." + name + ".egress]")
        directory = os.path.dirname(config.file) if config.file is not None else None
        where = f"{config.file}: [sandboxes.{name}]"
        plain = dict(settings)
        class_name = plain.pop(_CLASS_NAME, "")
        if not isinstance(class_name, str) or not (class_name + "x").isidentifier():
            raise InvalidOption(
                f"{where}: {_CLASS_NAME} is the name of a class, not {class_name!r:.100}.",
                hint='Write for example class_name = "PyBoxSandbox".',
                option=_CLASS_NAME,
                value=class_name,
            )
        parsed = parse_settings(where, plain, moved=moved, directory=directory)
        bindings[name] = Binding(
            name=name, settings=parsed.settings, file=str(config.file), class_name=class_name
        )
    return bindings


def bucket_binding(config: ProjectConfig, name: str) -> BucketBinding:
    """Return a bucket of a project, with the project's credentials if it has any."""
    from smokebox.sandbox.bucket import BucketBinding

    options = dict(config.buckets[name])
    target = options.pop("url", None) or options.pop("bucket")
    keys = {option: config.secrets.get(variable) for option, variable in CREDENTIALS.items()}
    if keys["access_key"] and keys["secret_key"]:
        options.update(keys)
    return BucketBinding(name=name, target=target, options=options)  # type: ignore[arg-type]


def _unknown(config: ProjectConfig, name: str) -> InvalidOption:
    if config.file is None:
        return InvalidOption(
            f"there is no {CONFIG_FILE} that could name {name!r}: none in {config.start} or above.",
            hint=f"Write one with [sandboxes.{name}], or [tool.smokebox.sandboxes.{name}] "
            f"in {PYPROJECT}.",
            option=name,
        )
    near = difflib.get_close_matches(name, config.sandboxes, n=1, cutoff=0.5)
    names = ", ".join(sorted(config.sandboxes)) or "none"
    return InvalidOption(
        f"{config.file} names no sandbox {name!r}.",
        hint=f"Did you mean {near[0]!r}?" if near else f"It names: {names}.",
        option=name,
        nearest=near[0] if near else None,
    )


env = Environment()
