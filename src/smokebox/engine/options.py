"""What a sandbox is asked to be: checked once, kept in the record, changed by asking again."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from smokebox.egress.layers import Layers, split_handlers
from smokebox.egress.policy import Egress
from smokebox.engine.egress.network import as_settings
from smokebox.engine.limits import Limits, parse_limits
from smokebox.engine.names import check_labels, check_user
from smokebox.engine.record.rows import SandboxRow, Settings
from smokebox.errors import Conflict, InvalidOption
from smokebox.options import check_env, refuse_unknown
from smokebox.sandbox.paths import check_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.egress.handler import HandlerOption
    from smokebox.engine.images.image import Image
    from smokebox.engine.jail.api import Tier

T = TypeVar("T")

DEFAULT_IMAGE = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for by name; None is what was not, and stays as it is."""

    image: str | None = None
    tier: Tier | None = None
    limits: Limits | None = None
    env: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    sleep_after: float | None = None
    keep_alive: bool | None = None
    ephemeral: bool | None = None
    cwd: str | None = None
    user: str | None = None
    egress: dict[str, Any] | None = None
    handlers: dict[str, HandlerOption] | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing was asked for."""
        return self == Options()

    def over(self, other: Options) -> Options:
        """Both, where these win."""
        asked = {
            name: value for name in self.__slots__ if (value := getattr(self, name)) is not None
        }
        return replace(other, **asked)

    def settings(self, now: Settings) -> Settings:
        """`now` with what was asked for."""
        return Settings(
            sleep_after=_or(self.sleep_after, now.sleep_after),
            keep_alive=_or(self.keep_alive, now.keep_alive),
            ephemeral=_or(self.ephemeral, now.ephemeral),
            cwd=_or(self.cwd, now.cwd),
            user=_or(self.user, now.user),
        )

    def layers(self, now: Layers) -> Layers:
        """What it may reach, with what was asked for."""
        return now if self.egress is None else now.with_settings(self.egress)

    def row(self, id: str, *, key: str, image: Image, tier: Tier) -> SandboxRow:
        """The record of a sandbox that is not there yet; the image has a say in it."""
        at = time.time()
        return SandboxRow(
            id=id,
            key=key,
            image=self.image or DEFAULT_IMAGE,
            digest=image.digest,
            tier=tier,
            created_at=at,
            last_active_at=at,
            limits=self.limits or Limits(),
            env=self.env or {},
            labels=self.labels or {},
            settings=self.settings(Settings(cwd=image.cwd, user=image.user)),
            egress=self.layers(Layers()),
        )

    def change(self, row: SandboxRow) -> SandboxRow:
        """The record of one that is there. What it was made from cannot change."""
        for name, wanted, has in (
            ("image", self.image, row.image),
            ("tier", self.tier, row.tier),
        ):
            if wanted is not None and wanted != has:
                raise Conflict(
                    f"sandbox {row.id} has the {name} {has!r}, not {wanted!r}.",
                    hint="Destroy it first, or use another id.",
                    kind=name,
                    name=row.id,
                )
        return replace(
            row,
            limits=self.limits or row.limits,
            env=row.env if self.env is None else self.env,
            labels=row.labels if self.labels is None else self.labels,
            settings=self.settings(row.settings),
            egress=self.layers(row.egress),
        )


class SandboxOptions(TypedDict, total=False):
    """The options of `Host.sandbox`, as users give them.

    `limits` is an instance type by name, or numbers by name. `sleep_after` is seconds, or
    "30s", "10m", "2h" without a call, after which the sandbox sleeps unless `keep_alive`.
    An `ephemeral` one forgets its files when it does. `egress` says what it may reach, which
    by default is nothing; what was changed at run time stays.
    """

    image: str
    tier: Tier
    limits: Limits | str | Mapping[str, object]
    env: Mapping[str, str]
    labels: Mapping[str, str]
    sleep_after: float | str
    keep_alive: bool
    ephemeral: bool
    cwd: str
    user: str
    egress: Egress | Mapping[str, object]


def parse_options(where: str, given: SandboxOptions) -> Options:
    """Options as users give them, checked. One that is None was not given."""
    refuse_unknown(where, given, SandboxOptions.__annotations__)
    asked = {name: value for name, value in given.items() if value is not None}
    options = Options(**{name: _CHECKS[name](value) for name, value in asked.items()})
    if options.egress is None:
        return options
    split = split_handlers(options.egress)
    Layers().with_settings(split.settings)
    return replace(options, egress=split.settings, handlers=split.handlers)


def parse_duration(value: float | str) -> float:
    """Seconds, from a number or from text such as "30s", "10m" or "2h"."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number: object = value
    if isinstance(value, str) and value[-1:] in units:
        try:
            number = float(value[:-1]) * units[value[-1]]
        except ValueError:
            number = value
    if (
        isinstance(number, bool)
        or not isinstance(number, (int, float))
        or not 0 < number < float("inf")
    ):
        raise InvalidOption(
            f"sleep_after is a positive time, not {value!r}.",
            hint='Pass seconds, or "30s", "10m", "2h"; keep_alive=True is for never.',
            option="sleep_after",
            value=value,
        )
    return float(number)


def _or(asked: T | None, has: T) -> T:
    return has if asked is None else asked


def _flag(option: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidOption(
        f"{option} is True or False, not {value!r}.",
        hint="Pass one of them, or leave it out.",
        option=option,
        value=value,
    )


def _image(value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise InvalidOption(
        f"an image is named by a str, not {value!r}.",
        hint="Leave it out for the host's own programs, or pass 'dir:/path/to/a/root'.",
        option="image",
        value=value,
    )


def _tier(value: object) -> Tier:
    if value == "namespaces" or value == "gvisor":
        return value
    raise InvalidOption(
        f"there is no tier {value!r}.",
        hint="The tiers are 'namespaces' and 'gvisor'.",
        option="tier",
        value=value,
    )


def _cwd(value: str) -> str:
    if not check_path(value).startswith("/"):
        raise InvalidOption(
            f"the cwd of a sandbox is an absolute path, not {value!r}.",
            hint=f"Pass for example '/workspace/{value}'.",
            option="cwd",
            value=value,
        )
    return value


def _egress(value: object) -> dict[str, Any]:
    if isinstance(value, (Egress, Mapping)):
        return dict(as_settings(value))
    raise InvalidOption(
        f"egress is an Egress, not {value!r:.200}.",
        hint="Pass Egress(allowed_hosts=['pypi.org']), or its settings by name.",
        option="egress",
        value=value,
    )


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "image": _image,
    "tier": _tier,
    "limits": parse_limits,
    "env": check_env,
    "labels": check_labels,
    "sleep_after": parse_duration,
    "keep_alive": functools.partial(_flag, "keep_alive"),
    "ephemeral": functools.partial(_flag, "ephemeral"),
    "cwd": _cwd,
    "user": check_user,
    "egress": _egress,
}
