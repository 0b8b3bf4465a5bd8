"""Approval of tool calls: the policy, and the queue of calls that wait for a decision."""

from __future__ import annotations

import asyncio
import fnmatch
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from smokebox.agents.events import ApprovalNeeded
from smokebox.agents.log.records import ApprovalDecided, ApprovalRequested
from smokebox.errors import InvalidOption, NotFound
from smokebox.options import nearest_hint, refuse_unknown

if TYPE_CHECKING:
    from smokebox.agents.log.event_log import EventLog
    from smokebox.agents.messages import ToolCall
    from smokebox.agents.tools.tool import ToolContext
    from smokebox.agents.work.item import WorkContext


_log = logging.getLogger("smokebox.approval")


@dataclass(frozen=True, slots=True)
class Deny:
    """Decision against a call: it does not run, and the model gets the reason."""

    reason: str = "this call is not allowed"


Verdict: TypeAlias = Literal["allow"] | Deny
Decision: TypeAlias = Verdict | Literal["ask"]


@dataclass(frozen=True, slots=True)
class ProposedCall:
    """A tool call that has not run."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


Callback: TypeAlias = "Callable[[ProposedCall, ToolContext], Decision | Awaitable[Decision]]"
Predicate: TypeAlias = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, slots=True)
class ToolRule:
    """Rule for calls of the tools that match the pattern `tool`, such as `bash` or `git_*`.

    With `when`, it applies only to arguments for which `when` returns true. The model gets
    `reason` if the rule denies.
    """

    tool: str
    when: Predicate | None = None
    reason: str = ""

    def matches(self, call: ProposedCall) -> bool:
        """Return True if the rule applies to this call."""
        if not fnmatch.fnmatchcase(call.name, self.tool):
            return False
        return self.when is None or bool(self.when(call.arguments))


Rules: TypeAlias = Sequence[str | ToolRule] | Mapping[str, str | Predicate]


@dataclass(frozen=True, slots=True, init=False)
class Approval:
    """A policy for tool calls, by name and arguments, or a function that decides.

        Approval(ask=["bash"], deny={"write": "this workspace is read-only"})
        Approval(ask=[ToolRule("bash", when=lambda args: "push" in args["command"])])
        Approval(decide)    # decide(call, ctx) -> "allow", "ask" or Deny("why")

    A function decides first; if it returns None, the rules do. Calls that match `deny` are
    denied, then calls that match `ask` wait for approval, then calls that match `allow` run.
    `otherwise` applies to the rest: by default "ask" if `allow` is given, else "allow". A
    function or rule that raises denies the call.
    """

    decide_by: Callback | None
    deny: tuple[ToolRule, ...]
    ask: tuple[ToolRule, ...]
    allow: tuple[ToolRule, ...]
    otherwise: Decision = field()

    def __init__(
        self,
        decide_by: Callback | None = None,
        /,
        *,
        deny: Rules = (),
        ask: Rules = (),
        allow: Rules = (),
        otherwise: Literal["allow", "ask", "deny"] | Deny | None = None,
    ) -> None:
        if decide_by is not None and not callable(decide_by):
            raise _wrong(f"{decide_by!r} is not a function (call, ctx).", "approval")
        settings = {
            "decide_by": decide_by,
            "deny": _rules("deny", deny),
            "ask": _rules("ask", ask),
            "allow": _rules("allow", allow),
            "otherwise": _decision(otherwise or ("ask" if allow else "allow")),
        }
        for name, value in settings.items():
            object.__setattr__(self, name, value)

    async def decide(self, call: ProposedCall, ctx: ToolContext) -> Decision:
        """Decide about a call. Never raises: a function or rule that fails denies it."""
        try:
            if self.decide_by is not None:
                decided = cast("object", self.decide_by(call, ctx))
                decided = await decided if inspect.isawaitable(decided) else decided
                if decided is not None:
                    return _decision(decided)
            return self._by_rules(call)
        except Exception as error:
            _log.exception("approval of the tool %s failed", call.name)
            reason = f"the approval check of this call failed: {type(error).__name__}"
            return Deny(f"{reason}: {error}" if str(error) else reason)

    def check_names(self, known: Iterable[str]) -> None:
        """Raise `InvalidOption` for a rule about a tool that does not exist.

        A misspelled name in `deny` or `ask` would let calls pass.
        """
        names = list(known)
        for rule in (*self.deny, *self.ask, *self.allow):
            if rule.tool not in names and not set(rule.tool) & set("*?["):
                raise InvalidOption(
                    f"approval has a rule for the tool {rule.tool!r}, which does not exist.",
                    hint=nearest_hint(rule.tool, names),
                    option="approval",
                    value=rule.tool,
                )

    def _by_rules(self, call: ProposedCall) -> Decision:
        for rule in self.deny:
            if rule.matches(call):
                return Deny(rule.reason) if rule.reason else Deny()
        if any(rule.matches(call) for rule in self.ask):
            return "ask"
        if any(rule.matches(call) for rule in self.allow):
            return "allow"
        return self.otherwise


ApprovalChoice: TypeAlias = "Approval | Callback | Mapping[str, Any]"


def as_approval(value: object) -> Approval | None:
    """Return the option as a policy: an `Approval`, its keywords, a function, or None for none."""
    if value is None or isinstance(value, Approval):
        return value
    if isinstance(value, Mapping):
        keywords: dict[str, Any] = dict(value)
        refuse_unknown("approval", keywords, ("deny", "ask", "allow", "otherwise"))
        return Approval(**keywords)
    if callable(value):
        return Approval(cast("Callback", value))
    raise _wrong(f"{value!r} is not an approval policy.", "approval")


def _rules(option: str, rules: Rules) -> tuple[ToolRule, ...]:
    if isinstance(rules, Mapping):
        return tuple(_rule(option, tool, detail) for tool, detail in rules.items())
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise _wrong(f"{option}={rules!r} is not a list of tools.", option)
    return tuple(_rule(option, tool, None) for tool in rules)


def _rule(option: str, tool: object, detail: object) -> ToolRule:
    if isinstance(tool, ToolRule):
        return tool
    if isinstance(tool, str) and tool:
        if detail is None:
            return ToolRule(tool)
        if isinstance(detail, str) and option == "deny":
            return ToolRule(tool, reason=detail)
        if callable(detail):
            return ToolRule(tool, when=cast("Predicate", detail))
    raise _wrong(
        f"{option}: {tool!r}{'' if detail is None else f': {detail!r}'} is not a rule.", option
    )


def _decision(value: object) -> Decision:
    if isinstance(value, Deny):
        return value
    if value == "allow":
        return "allow"
    if value == "ask":
        return "ask"
    if value == "deny":
        return Deny()
    raise _wrong(f"{value!r} is not a decision.", "approval")


def _wrong(message: str, option: str) -> InvalidOption:
    return InvalidOption(
        message,
        hint="Write Approval(ask=['bash'], deny={'write': 'why'}), with names or ToolRule(...), or "
        "pass a function (call, ctx) that returns 'allow', 'ask' or Deny('why').",
        option=option,
    )


@dataclass(slots=True)
class ApprovalQueue:
    """Tool calls of a session that wait for approval."""

    event_log: EventLog
    _waiting: dict[str, tuple[ApprovalNeeded, asyncio.Future[Verdict]]] = field(
        default_factory=dict
    )

    @property
    def waiting(self) -> list[ApprovalNeeded]:
        """Pending calls, oldest first."""
        return [needed for needed, _ in self._waiting.values()]

    async def wait(self, needed: ApprovalNeeded) -> Verdict:
        """Wait for the decision about a call."""
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting[needed.call_id] = (needed, verdict)
        try:
            return await verdict
        finally:
            self._waiting.pop(needed.call_id, None)

    async def decide(self, call_id: str, verdict: Verdict) -> None:
        """Allow or deny a pending call. The decision is recorded before it takes effect.

        Raises:
            NotFound: No such call is pending.
        """
        if call_id not in self._waiting:
            known = ", ".join(self._waiting) or "none"
            raise NotFound(
                f"no tool call {call_id!r} waits for approval.",
                hint=f"Pending calls: {known}.",
                kind="approval",
                name=call_id,
            )
        _, waiting = self._waiting.pop(call_id)
        reason = verdict.reason if isinstance(verdict, Deny) else ""
        await self.event_log.append(ApprovalDecided(call_id, verdict == "allow", reason))
        if not waiting.done():
            waiting.set_result(verdict)


async def check_approval(
    work: WorkContext,
    approval: Approval,
    call: ToolCall,
    arguments: dict[str, Any],
    ctx: ToolContext,
) -> Verdict:
    """Decide about a call of a work item, and wait for approval if the policy requires it.

    A call that was pending or decided when a previous process was killed keeps that state.
    """
    pending = {one.call.id: one for one in work.event_log.conversation.pending_calls}
    known = pending.get(call.id)
    if known is not None and known.approval in ("allowed", "denied"):
        return "allow" if known.approval == "allowed" else Deny(known.reason)
    if known is None or known.approval == "none":
        decision = await approval.decide(ProposedCall(call.name, arguments, call.id), ctx)
        if decision != "ask":
            return decision
        await work.event_log.append(
            ApprovalRequested(work.work_id, call.id, call.name, call.arguments)
        )
    needed = ApprovalNeeded(call.id, call.name, arguments)
    work.emit(needed)
    return await work.session.approvals.wait(needed)
