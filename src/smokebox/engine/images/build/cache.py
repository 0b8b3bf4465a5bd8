"""The cache of build steps: layers by the key of all that a step depends on, for each scope."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smokebox.engine.images.catalog import LayerReference
from smokebox.engine.record.rows import BuildStepRow, delete, put

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from smokebox.engine.images.layer_store import LayerStore
    from smokebox.engine.record.record import Record

_TOUCH_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedStep:
    """The layers that a step added, the uppermost first, and when it ran.

    `key` is the key of the state after it.
    """

    key: str
    layers: tuple[LayerReference, ...]
    created_at: float


class BuildCache:
    """Finished steps in the durable record. No scope sees those of another."""

    def __init__(self, record: Record, layer_store: LayerStore) -> None:
        self._record = record
        self._layer_store = layer_store
        self._turns: weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )

    @contextlib.asynccontextmanager
    async def turn(self, scope: str, key: str) -> AsyncIterator[None]:
        """Keep others from making the same step during the block."""
        lock = self._turns.setdefault((scope, key), asyncio.Lock())
        async with lock:
            yield

    async def find(self, scope: str, key: str) -> CachedStep | None:
        """Return the step of a key, unless a layer of it is gone."""
        row = await self._record.get(BuildStepRow, scope, key)
        if row is None:
            return None
        layers = _load(row)
        if any(self._layer_store.get(layer.id) is None for layer in layers):
            await self._record.write(delete(BuildStepRow, scope, key))
            return None
        if time.time() - row.used_at > _TOUCH_SECONDS:
            await self._record.write(put(replace(row, used_at=time.time())))
        return CachedStep(key=row.result, layers=layers, created_at=row.created_at)

    async def add(
        self,
        scope: str,
        key: str,
        layers: Sequence[LayerReference],
        *,
        result: str = "",
        created_at: float | None = None,
    ) -> CachedStep:
        """Record a finished step. `result` is the key of the state after it, by default `key`."""
        now = time.time()
        text = json.dumps([[layer.id, layer.target] for layer in layers])
        row = BuildStepRow(
            scope=scope,
            key=key,
            result=result or key,
            stored=text,
            created_at=now if created_at is None else created_at,
            used_at=now,
        )
        await self._record.write(put(row))
        return CachedStep(key=row.result, layers=tuple(layers), created_at=row.created_at)

    async def clear(self, scope: str) -> None:
        """Forget all steps of a scope; their layers go with the next `prune` of images."""
        await self._record.write(delete(BuildStepRow, scope))


def _load(row: BuildStepRow) -> tuple[LayerReference, ...]:
    return tuple(LayerReference(id=id, target=target) for id, target in json.loads(row.stored))
