"""A bucket as another client sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import obstore

from smokebox.sandbox.stores import open_target

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from smokebox.sandbox.access import Access


class Store:
    """The objects of a bucket by key."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @classmethod
    def of(cls, name: str, access: Access) -> Store:
        """Open a bucket."""
        return cls(open_target(name, "", access).store)

    def __contains__(self, key: str) -> bool:
        return key in self.keys()

    def __getitem__(self, key: str) -> bytes:
        return obstore.get(self._store, key).bytes().to_bytes()

    def __setitem__(self, key: str, data: bytes) -> None:
        obstore.put(self._store, key, data)

    def __delitem__(self, key: str) -> None:
        obstore.delete(self._store, key)

    def keys(self) -> list[str]:
        """Return all keys, sorted."""
        return sorted(meta["path"] for page in obstore.list(self._store) for meta in page)
