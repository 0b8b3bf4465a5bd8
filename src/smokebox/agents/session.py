"""Sessions: one conversation with an agent, as a program uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from smokebox.agents.approval import Deny
from smokebox.agents.images import check_images, store_images
from smokebox.agents.limits import UsageMeter
from smokebox.agents.messages import Text, UserMessage
from smokebox.agents.options import PromptOptions
from smokebox.agents.results import ResultSpec
from smokebox.agents.skills import find_skill
from smokebox.agents.work.checkpoint import RestoreItem, find_checkpoint
from smokebox.agents.work.compaction import CompactionItem
from smokebox.agents.work.prompt import new_prompt
from smokebox.agents.work.shell import ShellItem
from smokebox.agents.work.task import TaskItem, find_subagent
from smokebox.errors import InvalidOption
from smokebox.foundation.ids import new_id
from smokebox.options import check_env, check_timeout, refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smokebox.agents.events import ApprovalNeeded
    from smokebox.agents.harness import Harness
    from smokebox.agents.images import ImageSource
    from smokebox.agents.limits import Budget
    from smokebox.agents.log.conversation import Checkpoint
    from smokebox.agents.log.store import SessionKey
    from smokebox.agents.messages import Message, Usage
    from smokebox.agents.operation import Operation
    from smokebox.agents.results import Reply
    from smokebox.agents.session_context import SessionContext
    from smokebox.agents.work.item import WhenBusy
    from smokebox.types import ExecResult

T = TypeVar("T")

# A joined message is answered by the running prompt, so these options would have no effect.
_NOT_WHEN_JOINING = ("tools", "model", "thinking", "budget")


class Session:
    """One conversation. `Harness.session` opens it.

    `prompt`, `skill`, `task`, `shell` and `compact` return an `Operation`: await it for its
    result, iterate over it for its events. A session does one at a time. A second one raises
    `SessionBusy`; with `when_busy="queue"` it runs afterwards, and with `"join"` the model
    sees it at its next turn.
    """

    def __init__(self, context: SessionContext) -> None:
        self._context = context

    @property
    def name(self) -> str:
        """The name of the session, unique in its harness."""
        return self._context.name

    @property
    def harness(self) -> Harness:
        """The harness that opened the session."""
        return self._context.harness

    @property
    def key(self) -> SessionKey:
        """The key of its event log in the store."""
        return self._context.key

    @property
    def running(self) -> Operation[Any] | None:
        """The work in progress, if any; also work that was resumed after a crash."""
        return self._context.queue.running

    @property
    def usage(self) -> Usage:
        """Tokens and cost since the session was created."""
        return self._context.event_log.conversation.usage

    @property
    def approvals(self) -> list[ApprovalNeeded]:
        """Tool calls that wait for `approve` or `deny`."""
        return self._context.approvals.waiting

    @overload
    def prompt(
        self,
        text: str,
        *,
        result: type[T],
        images: Sequence[ImageSource] = (),
        when_busy: WhenBusy = "raise",
        **options: Unpack[PromptOptions],
    ) -> Operation[Reply[T]]: ...

    @overload
    def prompt(
        self,
        text: str,
        *,
        result: Any = None,
        images: Sequence[ImageSource] = (),
        when_busy: WhenBusy = "raise",
        **options: Unpack[PromptOptions],
    ) -> Operation[Reply[Any]]: ...

    def prompt(
        self,
        text: str,
        *,
        result: Any = None,
        images: Sequence[ImageSource] = (),
        when_busy: WhenBusy = "raise",
        **options: Unpack[PromptOptions],
    ) -> Operation[Reply[Any]]:
        """Send a message to the agent, which works until it has an answer.

        Args:
            text: The message.
            result: Type of `Reply.data`: a pydantic model, dataclass, TypedDict, plain type,
                or a JSON schema.
            images: Images to show the model: bytes, paths in the workspace as str, or a
                `pathlib.Path` on the host.
            when_busy: What to do if the session is busy: "raise", "queue" or "join".
            options: See `PromptOptions`.

        Raises:
            SessionBusy: The session does other work.
            InvalidOption: An option is unknown or wrong, or the prompt is empty.
        """
        if not isinstance(text, str):
            raise InvalidOption(
                f"a prompt is a str, not {type(text).__name__}.",
                hint="Pass images with images=[...].",
                option="text",
            )
        checked = () if images == () else check_images(images)
        if not text.strip() and not checked:
            raise InvalidOption(
                "the prompt is empty.",
                hint="Pass a text, or an image with images=[...].",
                option="text",
                value=text,
            )
        session = self._context

        async def compose() -> UserMessage:
            log, workspace = session.event_log, session.setup.workspace
            parts = await store_images(checked, log.store, workspace) if checked else ()
            return UserMessage((Text(text), *parts))

        _check_names("prompt()", options)
        plain = result is None and not any(map(options.get, _NOT_WHEN_JOINING))
        if when_busy == "join" and not plain:
            raise InvalidOption(
                "a prompt with when_busy='join' takes no options: those of the first apply.",
                hint="Pass only text and images, or when_busy='queue'.",
                option="when_busy",
                value=when_busy,
            )
        item = new_prompt(session, "prompt", compose, result, options)
        return session.submit(item, when_busy=when_busy)

    def skill(
        self,
        name: str,
        args: Mapping[str, object] | str | None = None,
        *,
        result: Any = None,
        when_busy: WhenBusy = "raise",
        **options: Unpack[PromptOptions],
    ) -> Operation[Reply[Any]]:
        """Have the agent follow a skill.

        Args:
            name: Name of the skill.
            args: Arguments for it, shown to the model as JSON or as they are.
            result: Type of `Reply.data`, as in `prompt`.
            when_busy: What to do if the session is busy: "raise", "queue" or "join".
            options: See `PromptOptions`.

        Raises:
            NotFound: There is no such skill; the hint names the nearest.
            SessionBusy: The session does other work.
            InvalidOption: An option is unknown or wrong.
        """
        session = self._context
        skill = find_skill(session.setup.skills, name)

        async def compose() -> UserMessage:
            return UserMessage((Text(await skill.prompt(args)),))

        _check_names("skill()", options)
        item = new_prompt(session, "skill", compose, result, options)
        return session.submit(item, when_busy=when_busy)

    def task(
        self,
        text: str,
        *,
        agent: str | None = None,
        cwd: str | None = None,
        result: Any = None,
        timeout: float | None = None,
        budget: Budget | Mapping[str, float] | None = None,
        when_busy: WhenBusy = "raise",
        key: str | None = None,
    ) -> Operation[Reply[Any]]:
        """Run a task in a child session, which does not see this conversation.

        The child works in the same sandbox, unless its agent has its own. This conversation
        does not see the task or its answer.

        Args:
            text: The task, in full.
            agent: Name of a subagent, by default a copy of this agent.
            cwd: Working directory, by default that of this agent.
            result: Type of `Reply.data`, as in `prompt`.
            timeout: The most seconds it may take.
            budget: Limits of the task, by default those of the agent.
            when_busy: What to do if the session is busy: "raise" or "queue".
            key: Idempotency key, as in `PromptOptions`.

        Raises:
            NotFound: There is no such subagent.
            SessionBusy: The session does other work.
        """
        session = self._context
        if agent is not None:
            find_subagent(session.setup.subagents, agent)
        item = TaskItem(
            session=session,
            prompt=text,
            agent=agent,
            cwd=cwd,
            result=None if result is None else ResultSpec.of(result),
            timeout=check_timeout(timeout),
            meter=session.new_meter(budget),
            key=key,
        )
        return session.submit(item, when_busy=when_busy)

    def shell(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        when_busy: WhenBusy = "raise",
    ) -> Operation[ExecResult]:
        """Run a command in the workspace, and show the model the command and its output.

        The values of `env` are not recorded, and the model does not see them.

        Args:
            command: Bash command.
            cwd: Working directory, by default that of the agent.
            env: Environment variables, besides those of the sandbox.
            timeout: Seconds after which the command is killed.
            when_busy: What to do if the session is busy: "raise" or "queue".

        Raises:
            Unsupported: The agent has no workspace.
            SessionBusy: The session does other work.
        """
        item = ShellItem(
            session=self._context,
            command=command,
            cwd=cwd,
            env=check_env(env),
            command_timeout=check_timeout(timeout),
        )
        return self._context.submit(item, when_busy=when_busy)

    def compact(self, focus: str | None = None, *, when_busy: WhenBusy = "raise") -> Operation[str]:
        """Summarize the conversation, and return the summary.

        The model then sees the summary instead of the messages that it covers. Returns "" if
        the conversation is too short to gain anything.

        Args:
            focus: What matters most in the summary.
            when_busy: What to do if the session is busy: "raise" or "queue".

        Raises:
            SessionBusy: The session does other work.
        """
        session = self._context
        meter = UsageMeter(None, session.meter)
        item = CompactionItem(session=session, focus=focus, meter=meter)
        return session.submit(item, when_busy=when_busy)

    async def messages(self) -> list[Message]:
        """Return the conversation as the model sees it, with what other processes have added.

        Raises:
            NotFound: The session was deleted.
        """
        await self._context.refresh()
        return list(self._context.event_log.conversation.messages)

    async def checkpoints(self) -> list[Checkpoint]:
        """Return the states of the workspace to which `restore` can return, oldest first.

        The option `checkpoints` of the agent makes them.

        Raises:
            NotFound: The session was deleted.
        """
        await self._context.refresh()
        return list(self._context.event_log.conversation.checkpoints)

    def restore(
        self, checkpoint: Checkpoint | str, *, when_busy: WhenBusy = "raise"
    ) -> Operation[None]:
        """Replace the files of the workspace by those of a checkpoint, and tell the model.

        The conversation goes on; `fork(at=checkpoint)` begins one that ends there.

        Args:
            checkpoint: A checkpoint of the session, or its id.
            when_busy: What to do if the session is busy: "raise" or "queue".

        Raises:
            NotFound: There is no such checkpoint, or it was not kept.
            Unsupported: The agent has no workspace.
            SessionBusy: The session does other work.
        """
        id = checkpoint if isinstance(checkpoint, str) else checkpoint.id
        item = RestoreItem(session=self._context, checkpoint=id)
        return self._context.submit(item, when_busy=when_busy)

    async def fork(self, name: str | None = None, *, at: Checkpoint | str | None = None) -> Session:
        """Create a session that starts with this conversation.

        Args:
            name: Name of the session, by default this one's with a random suffix.
            at: A checkpoint, or its id: the new session has the conversation up to there. The
                files stay as they are.

        Raises:
            NotFound: There is no such checkpoint.
            Conflict: There is a session of that name.
            InvalidOption: The name is too long, not printable, or reserved.
        """
        await self._context.refresh()
        name = name or new_id(self.name)
        found = None if at is None else find_checkpoint(self._context.event_log.conversation, at)
        return (await self._context.registry.fork(self._context, name, found)).handle

    async def delete(self) -> None:
        """Abort its work, then delete it with its event log and its tasks.

        Raises:
            NotFound: The session was already deleted.
        """
        self._context.check()
        await self._context.registry.delete(self.name)

    async def approve(self, call_id: str) -> None:
        """Allow a pending tool call.

        Args:
            call_id: Id of the call, as in `approvals`.

        Raises:
            NotFound: No such call is pending.
        """
        await self._context.approvals.decide(call_id, "allow")

    async def deny(self, call_id: str, reason: str = "") -> None:
        """Deny a pending tool call.

        Args:
            call_id: Id of the call, as in `approvals`.
            reason: Explanation for the model.

        Raises:
            NotFound: No such call is pending.
        """
        await self._context.approvals.decide(call_id, Deny(reason))


def stream_replies(session: Session) -> None:
    """Record replies while the model writes them, for readers of the event log."""
    session._context.event_log.live = True


def _check_names(where: str, options: PromptOptions) -> None:
    refuse_unknown(where, options, [*PromptOptions.__annotations__, "result", "when_busy"])
