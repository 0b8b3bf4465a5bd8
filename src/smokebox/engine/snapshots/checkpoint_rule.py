"""The rule of the automatic checkpoints of a sandbox, as the record stores it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRule:
    """A checkpoint each `every` seconds while the sandbox runs; None is no checkpoints.

    The last `keep_last` are kept, and those of the last `keep_for` seconds. None is no such rule.
    """

    every: float | None = None
    keep_last: int | None = None
    keep_for: float | None = None

    def describe(self) -> dict[str, float | None] | None:
        """Return the rule for users; None without checkpoints."""
        if self.every is None:
            return None
        return {"every": self.every, "keep_last": self.keep_last, "keep_for": self.keep_for}
