"""Quotas: how many sandboxes and backups a tenant has, and what they and its images take.

They are counted from the engine's record for the prefix of a key, with what is being created at
this moment, so that concurrent requests cannot both get the last place.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from smokebox.engine.options import DEFAULT_IMAGE
from smokebox.errors import Forbidden, LimitReached
from smokebox.limits import binary_size, decimal_size
from smokebox.server.tenancy.ceilings import (
    check_image,
    check_image_names,
    complete_options,
    is_digest,
)
from smokebox.tenancy.principal import Principal, current_principal
from smokebox.tenancy.profile import TOTALS
from smokebox.tenancy.scopes import WRITE
from smokebox.wire.responses import QuotaUse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable

    from smokebox.engine import Host
    from smokebox.engine.images.usage import Charging
    from smokebox.engine.options import CheckedOptions
    from smokebox.engine.record.rows import SandboxRow
    from smokebox.limits import Limits
    from smokebox.server.settings import ServerSettings
    from smokebox.tenancy.profile import Profile

# Of images that clients build or load.
_OWN_SOURCES = ("build", "failed build", "oci", "archive")
_FORMATS = {"total_memory": binary_size, "total_disk": decimal_size, "total_images": decimal_size}


@dataclass(frozen=True, slots=True, eq=False)
class _Reservation:
    """A sandbox that is being created, or gets other limits."""

    id: str
    limits: Limits


class Quotas:
    """The quotas of all tenants. `host` is set once the engine is open."""

    host: Host

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._sandboxes: set[_Reservation] = set()
        # What is being made, with its sandbox.
        self._making: dict[str, dict[str, str]] = {"backups": {}, "snapshots": {}}

    def group_cpu(self, group: str) -> float | None:
        """Return the cores that the sandboxes of a tenant may use together."""
        profile = self._settings.profiles.get(group.partition("/")[0])
        return None if profile is None else profile.tenant_cpu

    @contextlib.asynccontextmanager
    async def admit(self, id: str, options: CheckedOptions) -> AsyncIterator[CheckedOptions]:
        """Complete the options of a sandbox that the engine is about to create, and count it.

        The principal is that of the request that needs the sandbox.

        Raises:
            Forbidden: The key may not create a sandbox, or not of the default image.
            LimitReached: A quota is used up.
        """
        principal = current_principal.get()
        if principal is not None:
            # Reading through the bridge wakes, and so creates, a sandbox that does not exist.
            principal.check_scope(f"sandboxes:{WRITE}")
        if principal is None or principal.profile is None:
            yield options
            return
        options = await self._with_image(principal, options)
        options = complete_options(principal, options, self._settings)
        options = replace(options, group=principal.group)
        assert options.limits is not None
        async with self._reserve(principal, id, options.limits):
            yield options

    async def allowed_image(self, principal: Principal, image: str) -> str:
        """Return an image that a key may start from: a name, or the digest of one that it made.

        An image that a key made is allowed whatever its names are. The digest keeps its name from
        being looked up again, as it may refer to another image by then.

        Raises:
            Forbidden: The profile does not allow the image by any of its names.
        """
        try:
            check_image(principal, image, self._settings)
        except Forbidden:
            digest = await self._own_digest(principal, image)
            if digest is None:
                raise
            return digest
        if is_digest(image) and not await self._is_own(principal, image):
            names = await self.host.images.catalog.names(image, scope=principal.image_scope)
            check_image_names(principal, image, names, self._settings)
        return image

    async def _with_image(self, principal: Principal, options: CheckedOptions) -> CheckedOptions:
        """Return options with an image that the key may start from. Raises `Forbidden`."""
        image, digest = options.image, options.digest
        if options.snapshot is not None:
            row = await self.host.snapshots.row(options.snapshot)
            image, digest = row.image, row.digest
        if digest is not None and await self._is_own(principal, digest):
            return options
        name = image or DEFAULT_IMAGE
        found = await self.allowed_image(principal, name)
        if found == name:
            return options
        if digest is not None:
            # The key has given the name to an image of its own; what it starts is another one.
            check_image(principal, name, self._settings)
        return replace(options, digest=found)

    async def _own_digest(self, principal: Principal, name: str) -> str | None:
        """Return the digest of an image that a key made, by a name of its own; else None."""
        catalog, scope = self.host.images.catalog, principal.image_scope
        digest = await catalog.named(name, scope)
        return digest if digest is not None and await self._is_own(principal, digest) else None

    async def _is_own(self, principal: Principal, digest: str) -> bool:
        """Return whether a key made an image itself: its bases were checked when it was built."""
        catalog, scope = self.host.images.catalog, principal.image_scope
        found = await catalog.find(digest, scope=scope)
        made = found is not None and found.source in _OWN_SOURCES
        return made and await catalog.is_owned(digest, scope)

    @contextlib.asynccontextmanager
    async def resize(
        self, principal: Principal, id: str, limits: Limits | None
    ) -> AsyncIterator[None]:
        """Count other limits of a sandbox, if it exists. Raises `LimitReached`."""
        profile = principal.profile
        if (
            profile is None
            or limits is None
            or all(getattr(profile, total) is None for total in TOTALS)
            or await self.host.sandbox(id).info() is None
        ):
            yield
            return
        async with self._reserve(principal, id, limits):
            yield

    @contextlib.asynccontextmanager
    async def keep(
        self,
        principal: Principal,
        kind: Literal["backups", "snapshots"],
        id: str,
        sandbox: str,
        *,
        freed: Collection[str] = (),
    ) -> AsyncIterator[None]:
        """Count a backup or snapshot that is being made. Raises `LimitReached`.

        Those in `freed` are removed after that.
        """
        profile = principal.profile
        ceiling = None if profile is None else getattr(profile, kind)
        if profile is None or ceiling is None:
            yield
            return
        kept = self.host.backups if kind == "backups" else self.host.snapshots
        making = self._making[kind]
        before = dict(making)
        found = {one.id for one in await kept.list(prefix=principal.prefix)}
        under_way = {**before, **making}
        found |= {one for one, of in under_way.items() if of.startswith(principal.prefix)}
        if len(found - {id} - {*freed}) >= ceiling:
            raise _used_up(principal, profile, kind, ceiling, "Delete one")
        making[id] = sandbox
        try:
            yield
        finally:
            making.pop(id, None)

    @contextlib.asynccontextmanager
    async def admit_snapshot(
        self, row: SandboxRow, id: str, freed: Collection[str]
    ) -> AsyncIterator[None]:
        """Count a snapshot that the engine makes by itself, for the tenant of the sandbox.

        Raises `LimitReached`.
        """
        name, _, prefix = row.settings.group.partition("/")
        profile = self._settings.profiles.get(name)
        # Those of one tenant share the quota, whichever of its keys created the sandbox.
        owner = Principal(id=f"{prefix}*", prefix=prefix, profile=profile)
        async with self.keep(owner, "snapshots", id, row.id, freed=freed):
            yield

    def images(self, principal: Principal) -> Charging | None:
        """Return what charges a key for images that it stores; None without a ceiling."""
        profile = principal.profile
        ceiling = None if profile is None else profile.total_images
        if profile is None or ceiling is None:
            return None

        def refuse(used: int, wanted: int) -> LimitReached:
            advice = "Try again, as caches of its builds were removed, or remove an image"
            return _used_up(principal, profile, "total_images", ceiling, advice, used, wanted)

        return lambda: self.host.builds.usage.charge(_owner(principal), ceiling, refuse)

    async def check_import(self, principal: Principal, sandbox: str, size: int) -> None:
        """Raise `LimitReached` unless a key may store a snapshot of so many bytes.

        That of a sandbox that exists counts against its own limit.
        """
        profile = principal.profile
        ceiling = None if profile is None else profile.total_disk
        if profile is None or ceiling is None or await self.host.sandbox(sandbox).info():
            return
        used = next(one.used for one in await self.use(principal) if one.name == "total_disk")
        if used + size > ceiling:
            advice = "Delete snapshots"
            raise _used_up(principal, profile, "total_disk", ceiling, advice, used, size)

    async def use(self, principal: Principal) -> list[QuotaUse]:
        """Return what the sandboxes and backups of a key use, and its ceilings."""
        profile = principal.profile
        sandboxes = await self.host.list(prefix=principal.prefix)
        used: dict[str, float] = {"sandboxes": len(sandboxes)}
        for total, limit in TOTALS.items():
            used[total] = sum(one.limits[limit] or 0 for one in sandboxes)
        used["total_disk"] += await self.host.snapshots.stored_of_destroyed(principal.prefix)
        used["total_images"] = await self.host.builds.usage.of(_owner(principal))
        used["backups"] = len(await self.host.backups.list(prefix=principal.prefix))
        used["snapshots"] = len(await self.host.snapshots.list(prefix=principal.prefix))
        return [
            QuotaUse(name=name, used=value, ceiling=getattr(profile, name, None))
            for name, value in used.items()
        ]

    @contextlib.asynccontextmanager
    async def _reserve(self, principal: Principal, id: str, limits: Limits) -> AsyncIterator[None]:
        profile = principal.profile
        assert profile is not None
        if all(getattr(profile, quota) is None for quota in ("sandboxes", *TOTALS)):
            yield
            return
        # Before the read: a reservation goes when its row has been written.
        before = set(self._sandboxes)
        found = await self.host.list(prefix=principal.prefix)
        taken = [(one.id, one.limits) for one in found]
        taken += [
            (one.id, one.limits.to_json()) for one in before if one.id.startswith(principal.prefix)
        ]
        stored = 0
        if profile.total_disk is not None:
            stored = await self.host.snapshots.stored_of_destroyed(principal.prefix)
        taken += [
            (one.id, one.limits.to_json())
            for one in self._sandboxes - before
            if one.id.startswith(principal.prefix)
        ]
        self._check(principal, profile, taken, id, limits, stored)
        reservation = _Reservation(id, limits)
        # Nothing was awaited since the reservations were read.
        self._sandboxes.add(reservation)
        try:
            yield
        finally:
            self._sandboxes.discard(reservation)

    def _check(
        self,
        principal: Principal,
        profile: Profile,
        taken: Iterable[tuple[str, dict[str, float | None]]],
        id: str,
        limits: Limits,
        stored: int,
    ) -> None:
        """Raise `LimitReached` if a sandbox with these limits is too much beside the others."""
        # A sandbox may be twice in the list, with its old and its new limits.
        used: dict[str, dict[str, float]] = {}
        for one, its_limits in taken:
            sums = used.setdefault(one, dict.fromkeys(TOTALS, 0.0))
            for total, limit in TOTALS.items():
                value = its_limits[limit]
                most = getattr(profile.limits, limit) or 0.0
                sums[total] = max(sums[total], most if value is None else value)
        own = used.pop(id, None)
        if own is None and profile.sandboxes is not None and len(used) >= profile.sandboxes:
            raise _used_up(principal, profile, "sandboxes", profile.sandboxes, "Destroy one")
        for total, limit in TOTALS.items():
            ceiling, wanted = getattr(profile, total), getattr(limits, limit) or 0.0
            if ceiling is None or (own is not None and wanted <= own[total]):
                continue
            kept = stored if total == "total_disk" else 0
            taken_by_others = sum(sums[total] for sums in used.values()) + kept
            if taken_by_others + wanted > ceiling:
                advice = "Lower the limits of the sandbox, or destroy others"
                raise _used_up(principal, profile, total, ceiling, advice, taken_by_others, wanted)


def _owner(principal: Principal) -> set[str]:
    """Return the scopes of a key's images and builds."""
    return {principal.image_scope, principal.prefix}


def _used_up(
    principal: Principal,
    profile: Profile,
    quota: str,
    ceiling: float,
    advice: str,
    used: float | None = None,
    wanted: float = 1,
) -> LimitReached:
    """Return the error for a quota. By default the whole one is used, and one more is wanted."""
    amounts = [ceiling if used is None else used, wanted, ceiling]
    write = _FORMATS.get(quota, "{:g}".format)
    taken, more, most = map(write, amounts)
    error = LimitReached(
        f"this needs {more} of the quota {quota} of key {principal.id}, and {taken} of the {most} "
        f"that its profile {profile.name!r} allows are used.",
        hint=f"{advice}, or let the operator raise {profile.setting(quota)}.",
        limit=ceiling,
        key=principal.id,
        ceiling=quota,
    )
    # Waiting does not help.
    error.retryable = False
    return error
