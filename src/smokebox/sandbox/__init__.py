"""Sandboxes: the contract that all of them keep, and the ones that need no server."""

from smokebox.sandbox.api import ExecStream, SandboxApi

__all__ = ["ExecStream", "SandboxApi"]
