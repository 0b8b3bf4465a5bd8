"""Real things for tests of what is built on Smokebox."""

from smokebox.testing.seaweed import Seaweed

__all__ = ["Seaweed"]
