"""Smokebox gives Python agents a place to work.

Names are imported when they are first used, so that `import smokebox` costs nothing.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # As typing has it, without the time that importing typing takes.
if TYPE_CHECKING:
    from smokebox.errors import SmokeboxError as SmokeboxError
    from smokebox.sandbox.api import ExecStream as ExecStream
    from smokebox.sandbox.api import SandboxApi as SandboxApi
    from smokebox.sandbox.bucket import bucket as bucket
    from smokebox.sandbox.bucket import get_virtual_sandbox as get_virtual_sandbox
    from smokebox.sandbox.local import local as local
    from smokebox.sandbox.network import Allow as Allow
    from smokebox.sandbox.network import Network as Network
    from smokebox.sandbox.virtual import Limits as Limits
    from smokebox.sandbox.virtual import virtual as virtual
    from smokebox.sandbox.virtual.command import CommandCall as CommandCall
    from smokebox.sandbox.virtual.command import CommandOutput as CommandOutput
    from smokebox.sandbox.virtual.command import CommandStream as CommandStream
    from smokebox.types import Capabilities as Capabilities
    from smokebox.types import ExecResult as ExecResult
    from smokebox.types import FileInfo as FileInfo
    from smokebox.types import OutputChunk as OutputChunk

__version__ = "0.1.0"

_HOME = {
    "Allow": "smokebox.sandbox.network",
    "Capabilities": "smokebox.types",
    "CommandCall": "smokebox.sandbox.virtual.command",
    "CommandOutput": "smokebox.sandbox.virtual.command",
    "CommandStream": "smokebox.sandbox.virtual.command",
    "ExecResult": "smokebox.types",
    "ExecStream": "smokebox.sandbox.api",
    "FileInfo": "smokebox.types",
    "Limits": "smokebox.sandbox.virtual",
    "Network": "smokebox.sandbox.network",
    "OutputChunk": "smokebox.types",
    "SandboxApi": "smokebox.sandbox.api",
    "SmokeboxError": "smokebox.errors",
    "bucket": "smokebox.sandbox.bucket",
    "get_virtual_sandbox": "smokebox.sandbox.bucket",
    "local": "smokebox.sandbox.local",
    "virtual": "smokebox.sandbox.virtual",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'smokebox' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
