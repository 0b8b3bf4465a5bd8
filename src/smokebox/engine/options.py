"""Options of a sandbox: checked once, kept in the record, changed by passing them again."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from smokebox.egress.layers import EgressLayers, SplitPolicy, split_handlers
from smokebox.egress.policy import EgressOption, moved_options, parse_egress
from smokebox.engine.names import check_labels, check_user, is_snapshot_id
from smokebox.engine.record.rows import RunSettings, SandboxRow
from smokebox.engine.snapshots.checkpoint_rule import CheckpointRule
from smokebox.errors import Conflict, InvalidOption
from smokebox.foundation.paths import check_path
from smokebox.isolation import check_tier
from smokebox.limits import Limits, parse_limits
from smokebox.options import check_env, refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.engine.images.image import Image
    from smokebox.engine.record.rows import SnapshotRow
    from smokebox.isolation import Tier

DEFAULT_IMAGE = "host"
# How to have no such end, for errors.
_ENDLESS = {
    "sleep_after": "to never sleep, pass keep_alive=True",
    "lifetime": "leave it out for a sandbox without end",
    "keep_for": "leave it out to keep them whatever their age",
    "checkpoints": "pass False for none",
}
# An interval of checkpoints is at least so long, and so many are kept by default.
MIN_CHECKPOINT_SECONDS = 1.0
KEPT_CHECKPOINTS = 10
SNAPSHOT_PREFIX = "snapshot:"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedOptions:
    """Checked options. None means that an option was not passed and keeps its value.

    `group` and `digest` are no options of users: admission sets them. The group is that of
    `RunSettings`, and the digest is of the image to start from, whose name is not looked up then.
    """

    image: str | None = None
    digest: str | None = None
    tier: Tier | None = None
    limits: Limits | None = None
    env: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    sleep_after: float | None = None
    keep_alive: bool | None = None
    lifetime: float | None = None
    ephemeral: bool | None = None
    cwd: str | None = None
    user: str | None = None
    group: str | None = None
    egress: SplitPolicy | None = None
    snapshot: str | None = None
    checkpoints: CheckpointRule | None = None

    @property
    def empty(self) -> bool:
        """True if no option was passed."""
        return self == CheckedOptions()

    def over(self, other: CheckedOptions) -> CheckedOptions:
        """Return these options merged over `other`."""
        return replace(other, **self._passed(CheckedOptions))

    def settings(self, current: RunSettings) -> RunSettings:
        """Return `current` with these options applied."""
        return replace(current, **self._passed(RunSettings))

    def layers(self, current: EgressLayers) -> EgressLayers:
        """Return the egress layers with these options applied."""
        if self.egress is None:
            return current
        return current.with_settings(self.egress.settings, self.egress.granted)

    def row(
        self,
        id: str,
        *,
        key: str,
        image: Image,
        tier: Tier,
        user: str,
        origin: SnapshotRow | None = None,
    ) -> SandboxRow:
        """Return the row of a new sandbox, with defaults from the image, or from a snapshot.

        `user` is the default user.
        """
        at = time.time()
        settings = RunSettings(cwd=image.cwd, user=user)
        if origin is not None:
            settings = RunSettings(cwd=origin.settings.cwd, user=origin.settings.user)
        return SandboxRow(
            id=id,
            key=key,
            image=origin.image if origin is not None else self.image or DEFAULT_IMAGE,
            digest=image.digest,
            tier=tier,
            created_at=at,
            last_active_at=at,
            limits=self.limits or Limits(),
            env={**(origin.env if origin is not None else {}), **(self.env or {})},
            labels=self.labels or {},
            settings=self.settings(settings),
            egress=self.layers(EgressLayers()),
            layers=origin.layers if origin is not None else (),
            snapshot=origin.id if origin is not None else "",
        )

    def change(self, row: SandboxRow) -> SandboxRow:
        """Return the changed row of an existing sandbox. Its image and tier cannot change."""
        for name, value, current in (
            ("image", self.image, row.image),
            ("tier", self.tier, row.tier),
        ):
            if value is not None and value != current:
                raise Conflict(
                    f"sandbox {row.id} has the {name} {current!r}, not {value!r}.",
                    hint="Destroy it first, or use another id.",
                    kind=name,
                    name=row.id,
                )
        if self.snapshot not in (None, row.snapshot) and is_snapshot_id(self.snapshot):
            raise Conflict(
                f"sandbox {row.id} exists, and was not created from snapshot {self.snapshot}.",
                hint="Restore the snapshot in it, destroy it first, or use another id.",
                kind="snapshot",
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

    def _passed(self, kind: type[CheckedOptions | RunSettings]) -> dict[str, Any]:
        """Return the passed options that are fields of a class."""
        values = {field.name: getattr(self, field.name) for field in fields(kind)}
        return {name: value for name, value in values.items() if value is not None}


class SandboxOptions(TypedDict, total=False):
    """The options of `Host.sandbox`, as users pass them.

    `limits` is the name of an instance type, or numbers by name. `sleep_after` is the idle time
    before the sandbox sleeps, in seconds or as "30s", "10m", "2h"; `keep_alive` disables it.
    After its `lifetime`, counted from its creation, a sandbox is destroyed, in use or not; by
    default it has no end. An `ephemeral` sandbox loses its files when it sleeps. `egress` is the
    network policy, by default no access; changes made at run time stay. `snapshot` is the id or
    name of a snapshot to create it from, which `image="snapshot:NAME"` says too. `checkpoints` is
    the time between automatic snapshots while it runs, or a mapping of `every`, `keep_last` and
    `keep_for`; False is none.
    """

    image: str
    tier: Tier
    limits: Limits | str | Mapping[str, object]
    env: Mapping[str, str]
    labels: Mapping[str, str]
    sleep_after: float | str
    keep_alive: bool
    lifetime: float | str
    ephemeral: bool
    cwd: str
    user: str
    egress: EgressOption
    snapshot: str
    checkpoints: bool | float | str | Mapping[str, object]


def parse_options(where: str, options: SandboxOptions) -> CheckedOptions:
    """Check the options of a user. An option that is None counts as not passed."""
    refuse_unknown(where, options, SandboxOptions.__annotations__, moved_options())
    passed = split_image({name: value for name, value in options.items() if value is not None})
    checked = CheckedOptions(
        **{name: check(passed[name]) for name, check in _CHECKS.items() if name in passed}
    )
    if "egress" not in passed:
        return checked
    return replace(checked, egress=split_handlers(parse_egress(passed["egress"])))


def parse_duration(option: str, value: float | str) -> float:
    """Return seconds, from a number or from text such as "30s", "10m", "2h" or "7d"."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
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
            f"{option} must be a positive time, not {value!r}.",
            hint=f'Pass seconds, or "30s", "10m", "2h"; {_ENDLESS[option]}.',
            option=option,
            value=value,
        )
    return float(number)


def check_keep_last(value: object) -> int:
    """Return a number of snapshots to keep. Raises `InvalidOption`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise InvalidOption(
        f"keep_last must be a whole number from 1, not {value!r:.80}.",
        hint="Pass the number of snapshots to keep, such as 10.",
        option="keep_last",
        value=value,
    )


def parse_checkpoints(value: object) -> CheckpointRule:
    """Return the rule of automatic checkpoints that a user passed. Raises `InvalidOption`."""
    if value is False:
        return CheckpointRule()
    fields = dict(value) if isinstance(value, Mapping) else {"every": value}
    refuse_unknown("checkpoints", fields, CheckpointRule.__annotations__)
    every: Any = fields.get("every")
    seconds = parse_duration("checkpoints", every)
    if seconds < MIN_CHECKPOINT_SECONDS:
        raise InvalidOption(
            f"checkpoints must be at least {MIN_CHECKPOINT_SECONDS:g} s apart, not {every!r:.80}.",
            hint="Pass for example checkpoints='10m'.",
            option="checkpoints",
            value=value,
        )
    keep_last: Any = fields.get("keep_last")
    keep_for: Any = fields.get("keep_for")
    if keep_last is None and keep_for is None:
        keep_last = KEPT_CHECKPOINTS
    return CheckpointRule(
        every=seconds,
        keep_last=None if keep_last is None else check_keep_last(keep_last),
        keep_for=None if keep_for is None else parse_duration("keep_for", keep_for),
    )


def _flag(option: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidOption(
        f"{option} must be True or False, not {value!r}.",
        hint="Pass one of them, or leave it out.",
        option=option,
        value=value,
    )


def _image(value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise InvalidOption(
        f"image must be a non-empty str, not {value!r}.",
        hint="Leave it out for the host's own programs, or pass 'dir:NAME' of a named directory.",
        option="image",
        value=value,
    )


def split_image(passed: dict[str, object]) -> dict[str, object]:
    """Return options with `snapshot` in the place of an image `snapshot:NAME`."""
    image = passed.get("image")
    if isinstance(image, str) and image.startswith(SNAPSHOT_PREFIX):
        name = image.removeprefix(SNAPSHOT_PREFIX)
        del passed["image"]
        if passed.setdefault("snapshot", name) == name:
            return passed
    elif image is None or "snapshot" not in passed:
        return passed
    raise InvalidOption(
        f"a sandbox is created from an image or from a snapshot, and image is {image!r:.80}.",
        hint="A snapshot has the image that it was made of: leave image out.",
        option="image",
        value=image,
    )


def _snapshot(value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise InvalidOption(
        f"snapshot must be the id or the name of a snapshot, not {value!r:.80}.",
        hint="Pass for example snapshot='after-setup'.",
        option="snapshot",
        value=value,
    )


def _cwd(value: str) -> str:
    if not check_path(value).startswith("/"):
        raise InvalidOption(
            f"the cwd of a sandbox must be an absolute path, not {value!r}.",
            hint=f"Pass for example '/workspace/{value}'.",
            option="cwd",
            value=value,
        )
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "image": _image,
    "tier": check_tier,
    "limits": parse_limits,
    "env": check_env,
    "labels": check_labels,
    "sleep_after": functools.partial(parse_duration, "sleep_after"),
    "keep_alive": functools.partial(_flag, "keep_alive"),
    "lifetime": functools.partial(parse_duration, "lifetime"),
    "ephemeral": functools.partial(_flag, "ephemeral"),
    "cwd": _cwd,
    "user": check_user,
    "snapshot": _snapshot,
    "checkpoints": parse_checkpoints,
}
