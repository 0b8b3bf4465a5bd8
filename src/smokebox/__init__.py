"""Sandboxes and a harness for Python agents. docs/api.md lists the public names.

Names are imported on first use, so that `import smokebox` stays fast.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # As in typing, which takes long to import.
if TYPE_CHECKING:
    from smokebox.agents.agent import Agent as Agent
    from smokebox.agents.agent import create_agent as create_agent
    from smokebox.agents.harness import Harness as Harness
    from smokebox.agents.harness import init as init
    from smokebox.agents.limits import Budget as Budget
    from smokebox.agents.limits import Durability as Durability
    from smokebox.agents.session import Session as Session
    from smokebox.agents.skills import Skill as Skill
    from smokebox.agents.tools.function import tool as tool
    from smokebox.client.agent_client import AgentClient as AgentClient
    from smokebox.client.bindings import env as env
    from smokebox.client.client import Client as Client
    from smokebox.client.client import connect as connect
    from smokebox.client.client import get_sandbox as get_sandbox
    from smokebox.client.client import list_sandboxes as list_sandboxes
    from smokebox.client.image import Image as Image
    from smokebox.client.previews import proxy_to_sandbox as proxy_to_sandbox
    from smokebox.client.process import Process as Process
    from smokebox.client.sandbox import Sandbox as Sandbox
    from smokebox.client.settings import SandboxSettings as SandboxSettings
    from smokebox.client.shell_session import ShellSession as ShellSession
    from smokebox.client.terminal import Terminal as Terminal
    from smokebox.egress.policy import Egress as Egress
    from smokebox.errors import SmokeboxError as SmokeboxError
    from smokebox.limits import Limits as Limits
    from smokebox.limits import ProcessLimits as ProcessLimits
    from smokebox.runtime.stream import ExecStream as ExecStream
    from smokebox.sandbox.api import SandboxApi as SandboxApi
    from smokebox.sandbox.api import SnapshotApi as SnapshotApi
    from smokebox.sandbox.bucket import bucket as bucket
    from smokebox.sandbox.bucket import get_virtual_sandbox as get_virtual_sandbox
    from smokebox.sandbox.code import CodeStream as CodeStream
    from smokebox.sandbox.local import local as local
    from smokebox.sandbox.virtual import VirtualLimits as VirtualLimits
    from smokebox.sandbox.virtual import virtual as virtual
    from smokebox.sandbox.virtual.command import CommandCall as CommandCall
    from smokebox.sandbox.virtual.command import CommandOutput as CommandOutput
    from smokebox.sandbox.virtual.command import CommandStream as CommandStream
    from smokebox.types import Capabilities as Capabilities
    from smokebox.types import CodeContextInfo as CodeContextInfo
    from smokebox.types import CodeError as CodeError
    from smokebox.types import CodeExecution as CodeExecution
    from smokebox.types import CodeResult as CodeResult
    from smokebox.types import ExecResult as ExecResult
    from smokebox.types import FileInfo as FileInfo
    from smokebox.types import OutputChunk as OutputChunk

__version__ = "0.1.0"

_MODULES = {
    "Agent": "smokebox.agents.agent",
    "AgentClient": "smokebox.client.agent_client",
    "Budget": "smokebox.agents.limits",
    "Capabilities": "smokebox.types",
    "Client": "smokebox.client.client",
    "CodeContextInfo": "smokebox.types",
    "CodeError": "smokebox.types",
    "CodeExecution": "smokebox.types",
    "CodeResult": "smokebox.types",
    "CodeStream": "smokebox.sandbox.code",
    "CommandCall": "smokebox.sandbox.virtual.command",
    "CommandOutput": "smokebox.sandbox.virtual.command",
    "CommandStream": "smokebox.sandbox.virtual.command",
    "Durability": "smokebox.agents.limits",
    "Egress": "smokebox.egress.policy",
    "ExecResult": "smokebox.types",
    "ExecStream": "smokebox.runtime.stream",
    "FileInfo": "smokebox.types",
    "Harness": "smokebox.agents.harness",
    "Image": "smokebox.client.image",
    "Limits": "smokebox.limits",
    "OutputChunk": "smokebox.types",
    "Process": "smokebox.client.process",
    "ProcessLimits": "smokebox.limits",
    "Sandbox": "smokebox.client.sandbox",
    "SandboxApi": "smokebox.sandbox.api",
    "SnapshotApi": "smokebox.sandbox.api",
    "SandboxSettings": "smokebox.client.settings",
    "Session": "smokebox.agents.session",
    "ShellSession": "smokebox.client.shell_session",
    "Skill": "smokebox.agents.skills",
    "SmokeboxError": "smokebox.errors",
    "Terminal": "smokebox.client.terminal",
    "VirtualLimits": "smokebox.sandbox.virtual",
    "bucket": "smokebox.sandbox.bucket",
    "connect": "smokebox.client.client",
    "create_agent": "smokebox.agents.agent",
    "env": "smokebox.client.bindings",
    "get_sandbox": "smokebox.client.client",
    "get_virtual_sandbox": "smokebox.sandbox.bucket",
    "init": "smokebox.agents.harness",
    "list_sandboxes": "smokebox.client.client",
    "local": "smokebox.sandbox.local",
    "proxy_to_sandbox": "smokebox.client.previews",
    "tool": "smokebox.agents.tools.function",
    "virtual": "smokebox.sandbox.virtual",
}

_REPLACED = {
    "Allow": "Egress(allowed_hosts=...)",
    "Decision": "a handler of Egress",
    "Network": "Egress",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        hint = f" Use {_REPLACED[name]}." if name in _REPLACED else ""
        raise AttributeError(f"module 'smokebox' has no attribute {name!r}.{hint}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
