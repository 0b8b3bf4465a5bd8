"""Generate `smokebox/sync/__init__.pyi` from the async classes. Run it when they have changed."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smokebox import sync
from smokebox.sync.facade import RENAMED, Facade

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STUB = Path(sync.__file__).with_suffix(".pyi")
HEADER = """\
# Written by `tests/client/sync_stub.py`. Do not edit: change the async classes.
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Generic, Literal, Self, TypeVar, Unpack, overload

from smokebox.client.bindings import Binding
from smokebox.client.bindings import env as env
from smokebox.client.build_context import BuildContext
from smokebox.client.image_builds import BuildOptions
from smokebox.client.settings import SandboxSettings
from smokebox.client.agent_client import AgentEvent, SubmissionResult
from smokebox.client.transfer import Progress
from smokebox.client.transport import ImageProgress
from smokebox.egress.handler import HandlerOption
from smokebox.egress.policy import EgressInForce
from smokebox.limits import ProcessLimits
from smokebox.sandbox.bucket import BucketBinding
from smokebox.sandbox.code import CodeEvent
from smokebox.types import (
    Backup,
    BackupProgress,
    Capabilities,
    CodeContextInfo,
    CodeExecution,
    DiskUsage,
    ExecResult,
    ExposedPort,
    Extracted,
    FileInfo,
    GitCheckout,
    ImageDetails,
    ImageInfo,
    LayerProgress,
    LogChunk,
    LogMatch,
    Mount,
    NetworkEvent,
    OutputChunk,
    ProcessInfo,
    ProcessLogs,
    ProcessStatus,
    PrunedImages,
    PulledImage,
    PushedImage,
    RestoredBackup,
    SandboxInfo,
    SandboxStats,
    Snapshot,
    SnapshotDiff,
    SessionInfo,
    TerminalInfo,
    WatchEvent,
)
from smokebox.wire.builds import BuildEvent
from smokebox.wire import responses, submissions
from smokebox.wire.responses import KeyDetails, KeyInfo, NewKey

S = TypeVar("S", bound=Sandbox)
T = TypeVar("T")

class StreamIterator(Iterator[T], Generic[T]):
    def __next__(self) -> T: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
"""
# Attributes that __init__ sets, which a class does not list.
ATTRIBUTES = {
    "Sandbox": ["id: str"],
    "ShellSession": ["id: str", "info: SessionInfo"],
    "Process": ["id: str", "info: ProcessInfo"],
    "Terminal": ["id: str", "info: TerminalInfo"],
    "Watch": ["cursor: str | None"],
    "Client": [
        "keys: Keys",
        "images: Images",
        "backups: Backups",
        "builds: ImageBuilds",
        "snapshots: Snapshots",
    ],
    "AgentClient": ["def __init__(self, url: str, *, key: str | None = None) -> None: ..."],
    "Submission": ["id: str", "target_id: str | None"],
}
# Types of iteration, where the class is generic.
ITEMS = {"ExecStream": "OutputChunk", "CodeStream": "CodeEvent"}


def stub() -> str:
    """Return the text of the stub."""
    kinds = [one for one in vars(sync).values() if inspect.isclass(one) and one is not Facade]
    parts = [HEADER, *(_class(kind) for kind in kinds if issubclass(kind, Facade))]
    functions = [
        _function(one, "") for one in (sync.connect, sync.get_sandbox, sync.list_sandboxes)
    ]
    return "\n".join([*parts, *functions])


def _class(facade: type[Facade]) -> str:
    lines = [f"class {facade.__name__}:"]
    lines += [f"    {line}" for line in ATTRIBUTES.get(facade.__name__, [])]
    lines += [_member(facade._kind, name) for name in _names(facade._kind)]
    item = ITEMS.get(facade.__name__, "Item")
    return "\n".join(lines).replace("-> Item:", f"-> {item}:") + "\n"


def _names(kind: type[Any]) -> Iterator[str]:
    known = [name for name in dir(kind) if not name.startswith("_") or name in RENAMED]
    for name in known:
        member = inspect.getattr_static(kind, name)
        if inspect.isfunction(member) or isinstance(member, (property, classmethod)):
            yield name


def _member(kind: type[Any], name: str) -> str:
    member = inspect.getattr_static(kind, name)
    if name == "__aiter__":
        return "    def __iter__(self) -> Self: ..."
    if isinstance(member, property):
        assert member.fget is not None
        return f"    @property\n    def {name}(self) -> {_returned(member.fget)}: ..."
    if isinstance(member, classmethod):
        return "    @classmethod\n" + _function(member.__func__, "    ")
    return _function(member, "    ")


def _function(function: Callable[..., Any], indent: str) -> str:
    name = RENAMED.get(function.__name__, function.__name__)
    inner = getattr(function, "__wrapped__", function)
    forms = typing.get_overloads(inner) or [inner]
    lines = []
    for form in forms:
        if len(forms) > 1:
            lines.append(f"{indent}@overload")
        lines.append(f"{indent}def {name}({_parameters(form)}) -> {_returned(form)}: ...")
    return "\n".join(lines)


def _parameters(function: Callable[..., Any]) -> str:
    words, starred = [], False
    parameters = list(inspect.signature(function).parameters.values())
    for index, one in enumerate(parameters):
        if one.kind is one.KEYWORD_ONLY and not starred:
            words.append("*")
        starred = starred or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        mark = (
            "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
        )
        word = mark + one.name
        if one.annotation is not one.empty:
            word += f": {_plain(one.annotation)}"
        if one.default is not one.empty:
            word += " = ..." if one.annotation is one.empty else f" = {one.default!r}"
        words.append(word)
        following = parameters[index + 1 : index + 2]
        if one.kind is one.POSITIONAL_ONLY and not (
            following and following[0].kind is one.POSITIONAL_ONLY
        ):
            words.append("/")
    return ", ".join(words)


def _returned(function: Callable[..., Any]) -> str:
    return _plain(str(inspect.signature(function).return_annotation))


def _plain(annotation: str) -> str:
    streams = re.sub(r"AsyncGenerator\[(.+), None\]", r"StreamIterator[\1]", annotation)
    return streams.replace("AsyncIterable[", "Iterable[")


if __name__ == "__main__":
    STUB.write_text(stub())
    for order in (["format"], ["check", "--fix"]):
        subprocess.run([sys.executable, "-m", "ruff", *order, "--quiet", STUB], check=True)
