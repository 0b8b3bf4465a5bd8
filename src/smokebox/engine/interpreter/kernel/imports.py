"""What is done when code imports matplotlib or IPython: they are told of the kernel."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any


class Imports:
    """A finder before all others, which has functions called with modules that were loaded.

    `made` are modules that exist nowhere else, by the functions that fill them.
    """

    def __init__(
        self, after: dict[str, Callable[[Any], None]], made: dict[str, Callable[[Any], None]]
    ) -> None:
        self._after = after
        self._made = made
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Of importlib: the spec of a module that is ours to see to."""
        if name in self._made:
            return ModuleSpec(name, _Maker(self._made[name]))  # type: ignore[arg-type]
        call = self._after.get(name)
        spec = PathFinder.find_spec(name, path) if call is not None else None
        if spec is None or spec.loader is None or call is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            call(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Maker:
    def __init__(self, fill: Callable[[Any], None]) -> None:
        self.exec_module = fill

    def create_module(self, spec: ModuleSpec) -> None:
        return None
