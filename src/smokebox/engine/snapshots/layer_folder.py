"""The directory of the layers of snapshots, in the state directory.

A layer has one tree for each mount target of its image, numbered as in `data/upper` of a sandbox,
and a file with the targets. It never changes once it has its name.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

from smokebox.engine.files.descriptors import LIST, closing
from smokebox.engine.files.trees import remove_tree
from smokebox.engine.images.image import Layer
from smokebox.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_UNFINISHED = ".making-"
_TARGETS = "targets"


class LayerFolder:
    """Layers by id. Its methods block, but for `layers`, which reads one small file of each."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._targets: dict[str, tuple[str, ...]] = {}

    def layers(self, ids: Sequence[str]) -> tuple[Layer, ...]:
        """Return the trees of layers. Raises `NotFound` for a layer that is gone."""
        return tuple(
            Layer(path=os.path.join(self.path, id, str(number)), target=target)
            for id in ids
            for number, target in enumerate(self.targets(id))
            if target
        )

    def targets(self, id: str) -> tuple[str, ...]:
        """Return the mount targets of the trees of a layer; empty for a tree without files."""
        if id not in self._targets:
            try:
                with open(os.path.join(self.path, id, _TARGETS), encoding="utf-8") as file:
                    self._targets[id] = tuple(json.load(file))
            except FileNotFoundError:
                raise NotFound(
                    f"the layer {id} of a snapshot is gone from {self.path}.",
                    hint="Bring the directory back from a copy, or restore another snapshot.",
                    kind="layer",
                    name=id,
                ) from None
        return self._targets[id]

    def exists(self, id: str) -> bool:
        """Return whether a layer is complete."""
        return id in self._targets or os.path.exists(os.path.join(self.path, id, _TARGETS))

    def begin(self, id: str) -> str:
        """Return a directory for the trees of a layer that is not complete yet."""
        path = os.path.join(self.path, _UNFINISHED + id)
        os.makedirs(path, mode=0o711)
        return path

    def complete(self, id: str, targets: Sequence[str]) -> None:
        """Give a layer its name, after its trees were written to the disk."""
        unfinished = os.path.join(self.path, _UNFINISHED + id)
        self._write_targets(unfinished, targets)
        os.rename(unfinished, os.path.join(self.path, id))
        self._flush(self.path)

    def discard(self, id: str) -> None:
        """Remove a layer that is not complete."""
        self._remove(_UNFINISHED + id)

    def remove(self, id: str) -> None:
        """Remove a layer that no snapshot and no sandbox uses."""
        self._targets.pop(id, None)
        # Renamed first, so that no part of a layer is ever taken for one.
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(self.path, id), os.path.join(self.path, _UNFINISHED + id))
        self._remove(_UNFINISHED + id)

    def sweep(self, known: Collection[str]) -> None:
        """Remove every other layer, and those that a killed engine did not complete."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.path):
                if name not in known:
                    self._remove(name)

    def _remove(self, name: str) -> None:
        with (
            contextlib.suppress(FileNotFoundError),
            closing(os.open(self.path, LIST | os.O_CLOEXEC)) as parent,
        ):
            remove_tree(parent, name, os.path.join(self.path, name))

    def _write_targets(self, path: str, targets: Sequence[str]) -> None:
        part = os.path.join(path, f"{_TARGETS}.part")
        with open(part, "w", encoding="utf-8") as file:
            json.dump(list(targets), file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, os.path.join(path, _TARGETS))
        self._flush(path)

    def _flush(self, path: str) -> None:
        with closing(os.open(path, LIST | os.O_CLOEXEC)) as fd:
            os.fsync(fd)
