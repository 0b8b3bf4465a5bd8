"""Tests of approval policies."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from smokebox.agents.approval import Approval, Decision, Deny, ProposedCall, ToolRule, as_approval
from smokebox.agents.tools import ToolContext
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Mapping

CTX = ToolContext(session="s")


def pushes(arguments: Mapping[str, Any]) -> bool:
    return "push" in arguments["command"]


async def decide(approval: Approval, tool: str, **arguments: object) -> Decision:
    return await approval.decide(ProposedCall(tool, arguments, "c"), CTX)


async def test_rules_match_tool_names() -> None:
    approval = Approval(ask=["bash"], deny={"write": "read-only"})
    assert await decide(approval, "bash") == "ask"
    assert await decide(approval, "write") == Deny("read-only")
    assert await decide(approval, "read") == "allow"


async def test_allow_list_asks_for_other_tools() -> None:
    approval = Approval(allow=["read", "gr*"])
    assert [await decide(approval, tool) for tool in ("read", "grep", "bash")] == [
        "allow",
        "allow",
        "ask",
    ]
    strict = Approval(allow=["read"], otherwise="deny")
    assert await decide(strict, "bash") == Deny()
    assert await decide(Approval(otherwise=Deny("no")), "bash") == Deny("no")


async def test_deny_overrides_ask_and_ask_overrides_allow() -> None:
    approval = Approval(deny=["*__delete"], ask=["github__*"], allow=["*"])
    assert await decide(approval, "github__delete") == Deny()
    assert await decide(approval, "github__list") == "ask"
    assert await decide(approval, "read") == "allow"


@pytest.mark.parametrize(
    "approval",
    [Approval(ask={"bash": pushes}), Approval(ask=[ToolRule("bash", when=pushes)])],
)
async def test_rules_can_match_arguments(approval: Approval) -> None:
    assert await decide(approval, "bash", command="git push") == "ask"
    assert await decide(approval, "bash", command="git log") == "allow"
    assert await decide(approval, "read", path="push") == "allow"


async def test_deny_rule_has_a_reason() -> None:
    approval = Approval(deny=[ToolRule("bash", when=pushes, reason="do not push")])
    assert await decide(approval, "bash", command="git push") == Deny("do not push")


async def test_function_decides_by_call_and_context() -> None:
    async def later(call: ProposedCall, ctx: ToolContext) -> Decision:
        await asyncio.sleep(0)
        if call.name == "write":
            return Deny(f"{ctx.session} {call.id} {call.arguments['path']}")
        return "ask"

    def at_once(call: ProposedCall, ctx: ToolContext) -> Decision:
        return "allow"

    assert await decide(Approval(later), "write", path="x") == Deny("s c x")
    assert await decide(Approval(later), "bash") == "ask"
    assert await decide(Approval(at_once), "bash") == "allow"


async def test_rules_apply_if_the_function_returns_none() -> None:
    def undecided(call: ProposedCall, ctx: ToolContext) -> Any:
        return None

    assert await decide(Approval(undecided, ask=["bash"]), "bash") == "ask"


async def test_failing_policy_denies(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    def raises(call: ProposedCall, ctx: ToolContext) -> Decision:
        raise KeyError("oops")

    def returns_text(call: ProposedCall, ctx: ToolContext) -> Any:
        return "yes"

    for approval in (Approval(raises), Approval(returns_text), Approval(ask={"bash": pushes})):
        decided = await decide(approval, "bash")
        assert isinstance(decided, Deny)
        assert "approval check of this call failed" in decided.reason


async def test_cancellation_propagates() -> None:
    async def hangs(call: ProposedCall, ctx: ToolContext) -> Decision:
        await asyncio.Event().wait()
        return "allow"

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await decide(Approval(hangs), "bash")


async def test_option_accepts_dict_and_function() -> None:
    assert as_approval(None) is None
    assert as_approval({"ask": ["bash"]}) == Approval(ask=["bash"])
    by_function = as_approval(lambda call, ctx: "ask")
    assert by_function is not None
    assert await decide(by_function, "read") == "ask"


@pytest.mark.parametrize(
    "value",
    [
        "bash",
        {"asks": ["bash"]},
        {"ask": "bash"},
        {"ask": {"bash": "a reason is for deny"}},
        {"ask": [7]},
        {"deny": [""]},
        {"otherwise": "maybe"},
    ],
)
def test_invalid_policy_is_refused(value: object) -> None:
    with pytest.raises(InvalidOption):
        as_approval(value)
    with pytest.raises(InvalidOption, match="not a function"):
        Approval("bash")  # type: ignore[arg-type]


def test_rule_for_unknown_tool_is_refused() -> None:
    with pytest.raises(InvalidOption, match="Did you mean 'bash'"):
        Approval(ask=["bsah"]).check_names(["read", "bash"])
    with pytest.raises(InvalidOption, match="There are: read, bash"):
        Approval(deny={"zzz": "x"}).check_names(["read", "bash"])
    Approval(ask=["bash"], deny=["mcp__*"]).check_names(["read", "bash"])
