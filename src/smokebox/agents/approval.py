"""Approval: which tool calls run at once, which never, and which somebody has to allow."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown

if TYPE_CHECKING:
    from smokebox.agents.tools.toolcontext import ToolContext

_log = logging.getLogger("smokebox.approval")


@dataclass(frozen=True, slots=True)
class Deny:
    """The call does not run, and the model is told why."""

    reason: str = "this call is not allowed"


Decision: TypeAlias = Literal["allow", "ask"] | Deny


@dataclass(frozen=True, slots=True)
class ProposedCall:
    """A tool call that has not run."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


Callback: TypeAlias = "Callable[[ProposedCall, ToolContext], Decision | Awaitable[Decision]]"
Predicate: TypeAlias = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """Calls of the tools that `tool` names, where `*` stands for anything.

    With `when`, only those whose arguments it is true for; `reason` is for a rule that denies.
    """

    tool: str
    when: Predicate | None = None
    reason: str = ""

    def matches(self, call: ProposedCall) -> bool:
        """Whether the rule is about this call."""
        if not fnmatch.fnmatchcase(call.name, self.tool):
            return False
        return self.when is None or bool(self.when(call.arguments))


Rules: TypeAlias = Sequence[str | Rule] | Mapping[str, str | Predicate]


@dataclass(frozen=True, slots=True, init=False)
class Approval:
    """A policy for tool calls, by name and arguments, or a function that decides.

        Approval(ask=["bash"], deny={"write": "this workspace is read-only"})
        Approval(ask=[Rule("bash", when=lambda args: "push" in args["command"])])
        Approval(decide)    # decide(call, ctx) -> "allow", "ask" or Deny("why")

    What `deny` matches is denied; then what `ask` matches waits for somebody; then what
    `allow` matches runs; `otherwise` holds for the rest, which is "ask" where `allow` is
    given and "allow" where it is not. A function is asked first, and rules hold where it
    gives None. What fails to decide denies.
    """

    decide_by: Callback | None
    deny: tuple[Rule, ...]
    ask: tuple[Rule, ...]
    allow: tuple[Rule, ...]
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
        """What becomes of a call. Never raises: a rule that fails denies."""
        try:
            if self.decide_by is not None:
                decided = cast("object", self.decide_by(call, ctx))
                decided = await decided if inspect.isawaitable(decided) else decided
                if decided is not None:
                    return _decision(decided)
            return self._by_rules(call)
        except Exception as error:
            _log.exception("approval of the tool %s failed", call.name)
            said = f"whether this call is allowed could not be found out: {type(error).__name__}"
            return Deny(f"{said}: {error}" if str(error) else said)

    def check_names(self, known: Iterable[str]) -> None:
        """Raise `InvalidOption` for a rule about a tool that does not exist: a typing error
        here would let calls pass."""
        names = list(known)
        for rule in (*self.deny, *self.ask, *self.allow):
            if rule.tool not in names and not set(rule.tool) & set("*?["):
                near = difflib.get_close_matches(rule.tool, names, n=1, cutoff=0.5)
                hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(names)}."
                raise InvalidOption(
                    f"approval has a rule for the tool {rule.tool!r}, which does not exist.",
                    hint=hint,
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


def as_approval(value: object) -> Approval | None:
    """The option of an agent: an `Approval`, its keywords, a function, or None for no policy."""
    if value is None or isinstance(value, Approval):
        return value
    if isinstance(value, Mapping):
        keywords: dict[str, Any] = dict(value)
        refuse_unknown("approval", keywords, ("deny", "ask", "allow", "otherwise"))
        return Approval(**keywords)
    if callable(value):
        return Approval(cast("Callback", value))
    raise _wrong(f"{value!r} is no approval.", "approval")


def _rules(option: str, given: Rules) -> tuple[Rule, ...]:
    if isinstance(given, Mapping):
        return tuple(_rule(option, name, what) for name, what in given.items())
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise _wrong(f"{option}={given!r} is not a list of tools.", option)
    return tuple(_rule(option, each, None) for each in given)


def _rule(option: str, tool: object, what: object) -> Rule:
    if isinstance(tool, Rule):
        return tool
    if isinstance(tool, str) and tool:
        if what is None:
            return Rule(tool)
        if isinstance(what, str) and option == "deny":
            return Rule(tool, reason=what)
        if callable(what):
            return Rule(tool, when=cast("Predicate", what))
    raise _wrong(f"{option}: {tool!r}{'' if what is None else f': {what!r}'} is no rule.", option)


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


def _wrong(said: str, option: str) -> InvalidOption:
    return InvalidOption(
        said,
        hint="Write Approval(ask=['bash'], deny={'write': 'why'}), with names or Rule(...), or "
        "pass a function (call, ctx) that returns 'allow', 'ask' or Deny('why').",
        option=option,
    )
