"""The SDK for code that is not async: the same names without `await`.

    from smokebox.sync import get_sandbox

    sandbox = get_sandbox("user-42")
    print(sandbox.exec("uname -a").stdout)

Ctrl-C cancels the call, which kills its command. Safe to use from several threads and after a
fork. Callbacks run on the background thread of the event loop.
"""

from __future__ import annotations

from smokebox.client import agent_client as _agent_client
from smokebox.client import client as _client
from smokebox.client import image_builds as _image_builds
from smokebox.client import images as _images
from smokebox.client import port_socket as _port_socket
from smokebox.client import process as _process
from smokebox.client import sandbox as _sandbox
from smokebox.client import server_resources as _server_resources
from smokebox.client import shell_session as _shell_session
from smokebox.client import terminal as _terminal
from smokebox.client import watch as _watch
from smokebox.client.bindings import env
from smokebox.runtime import stream as _stream
from smokebox.sandbox import code as _code
from smokebox.sync.facade import Facade, StreamIterator, without_await

__all__ = [
    "AgentClient",
    "Backups",
    "Client",
    "CodeStream",
    "ExecStream",
    "ImageBuilds",
    "Images",
    "Keys",
    "Process",
    "Sandbox",
    "ShellSession",
    "Snapshots",
    "StreamIterator",
    "Submission",
    "Terminal",
    "Watch",
    "WebSocket",
    "connect",
    "env",
    "get_sandbox",
    "list_sandboxes",
]


class Sandbox(Facade, of=_sandbox.Sandbox):
    """`smokebox.Sandbox`, without `await`. Attributes of a subclass are settings."""


class ShellSession(Facade, of=_shell_session.ShellSession):
    """`smokebox.ShellSession`, without `await`."""


class Process(Facade, of=_process.Process):
    """`smokebox.Process`, without `await`."""


class Terminal(Facade, of=_terminal.Terminal):
    """`smokebox.Terminal`, without `await`."""


class Watch(Facade, of=_watch.Watch):
    """Result of `Sandbox.watch`, without `await`."""


class WebSocket(Facade, of=_port_socket.WebSocket):
    """Result of `Sandbox.ws_connect`, without `await`."""


class ExecStream(Facade, of=_stream.ExecStream):
    """`smokebox.ExecStream`, without `await`."""


class CodeStream(Facade, of=_code.CodeStream):
    """`smokebox.CodeStream`, without `await`."""


class Client(Facade, of=_client.Client):
    """`smokebox.Client`, without `await`."""


class AgentClient(Facade, of=_agent_client.AgentClient):
    """`smokebox.AgentClient`, without `await`."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        super().__init__(_agent_client.AgentClient(url, key=key))


class Submission(Facade, of=_agent_client.Submission):
    """Result of `AgentClient.send`, without `await`."""


class Backups(Facade, of=_server_resources.Backups):
    """`Client.backups`, without `await`."""


class ImageBuilds(Facade, of=_image_builds.ImageBuilds):
    """`Client.builds`, without `await`."""


class Images(Facade, of=_images.Images):
    """`Client.images`, without `await`."""


class Snapshots(Facade, of=_server_resources.Snapshots):
    """`Client.snapshots`, without `await`."""


class Keys(Facade, of=_server_resources.Keys):
    """`Client.keys`, without `await`."""


connect = without_await(_client.connect)
get_sandbox = without_await(_client.get_sandbox)
list_sandboxes = without_await(_client.list_sandboxes)
