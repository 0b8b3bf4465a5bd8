"""The SDK for code that is not async: the same names without `await`.

    from smokebox.sync import get_sandbox

    sandbox = get_sandbox("user-42")
    print(sandbox.exec("uname -a").stdout)

Ctrl-C cancels what is waited for, and so kills a command. May be used by several threads, and
after a fork. Callbacks run on the thread of the loop in the background.
"""

from __future__ import annotations

from smokebox.client import agent_client as _agent_client
from smokebox.client import backups as _backups
from smokebox.client import client as _client
from smokebox.client import keys as _keys
from smokebox.client import process as _process
from smokebox.client import sandbox as _sandbox
from smokebox.client import session as _session
from smokebox.client import submitted as _submitted
from smokebox.client import terminal as _terminal
from smokebox.client import watching as _watching
from smokebox.client import websocket as _websocket
from smokebox.client.bindings import env
from smokebox.sandbox import api as _api
from smokebox.sandbox import code as _code
from smokebox.sync.facade import Facade, Stream, calling

__all__ = [
    "AgentClient",
    "Backups",
    "Client",
    "CodeStream",
    "ExecStream",
    "Keys",
    "Process",
    "Sandbox",
    "Session",
    "Stream",
    "Submitted",
    "Terminal",
    "Watch",
    "WebSocket",
    "connect",
    "env",
    "get_sandbox",
    "list_sandboxes",
]


class Sandbox(Facade, of=_sandbox.Sandbox):
    """`smokebox.Sandbox`, without `await`. A subclass says how its sandboxes are."""


class Session(Facade, of=_session.Session):
    """`smokebox.client.session.Session`, without `await`."""


class Process(Facade, of=_process.Process):
    """`smokebox.client.process.Process`, without `await`."""


class Terminal(Facade, of=_terminal.Terminal):
    """`smokebox.client.terminal.Terminal`, without `await`."""


class Watch(Facade, of=_watching.Watch):
    """`smokebox.client.watching.Watch`, without `await`."""


class WebSocket(Facade, of=_websocket.WebSocket):
    """`smokebox.client.websocket.WebSocket`, without `await`."""


class ExecStream(Facade, of=_api.ExecStream):
    """`smokebox.ExecStream`, without `await`."""


class CodeStream(Facade, of=_code.CodeStream):
    """`smokebox.CodeStream`, without `await`."""


class Client(Facade, of=_client.Client):
    """`smokebox.Client`, without `await`."""


class AgentClient(Facade, of=_agent_client.AgentClient):
    """`smokebox.AgentClient`, without `await`."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        super().__init__(_agent_client.AgentClient(url, key=key))


class Submitted(Facade, of=_submitted.Submitted):
    """`smokebox.client.submitted.Submitted`, without `await`."""


class Backups(Facade, of=_backups.Backups):
    """`smokebox.client.backups.Backups`, without `await`."""


class Keys(Facade, of=_keys.Keys):
    """`smokebox.client.keys.Keys`, without `await`."""


connect = calling(_client.connect)
get_sandbox = calling(_client.get_sandbox)
list_sandboxes = calling(_client.list_sandboxes)
