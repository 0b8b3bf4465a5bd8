"""A policy says of each tool call whether it runs, waits for somebody, or never runs."""

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


async def test_rules_go_by_name_and_the_rest_runs() -> None:
    approval = Approval(ask=["bash"], deny={"write": "read-only"})
    assert await decide(approval, "bash") == "ask"
    assert await decide(approval, "write") == Deny("read-only")
    assert await decide(approval, "read") == "allow"


async def test_a_list_of_what_is_allowed_leaves_the_rest_to_be_asked_for() -> None:
    approval = Approval(allow=["read", "gr*"])
    assert [await decide(approval, tool) for tool in ("read", "grep", "bash")] == [
        "allow",
        "allow",
        "ask",
    ]
    strict = Approval(allow=["read"], otherwise="deny")
    assert await decide(strict, "bash") == Deny()
    assert await decide(Approval(otherwise=Deny("no")), "bash") == Deny("no")


async def test_what_denies_comes_before_what_asks_and_what_allows() -> None:
    approval = Approval(deny=["*__delete"], ask=["github__*"], allow=["*"])
    assert await decide(approval, "github__delete") == Deny()
    assert await decide(approval, "github__list") == "ask"
    assert await decide(approval, "read") == "allow"


@pytest.mark.parametrize(
    "approval",
    [Approval(ask={"bash": pushes}), Approval(ask=[ToolRule("bash", when=pushes)])],
)
async def test_rules_may_look_at_arguments(approval: Approval) -> None:
    assert await decide(approval, "bash", command="git push") == "ask"
    assert await decide(approval, "bash", command="git log") == "allow"
    assert await decide(approval, "read", path="push") == "allow"


async def test_a_rule_that_denies_by_arguments_says_why() -> None:
    approval = Approval(deny=[ToolRule("bash", when=pushes, reason="do not push")])
    assert await decide(approval, "bash", command="git push") == Deny("do not push")


async def test_a_function_decides_and_sees_the_call_and_its_context() -> None:
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


async def test_rules_hold_where_a_function_has_no_opinion() -> None:
    def shrug(call: ProposedCall, ctx: ToolContext) -> Any:
        return None

    assert await decide(Approval(shrug, ask=["bash"]), "bash") == "ask"


async def test_what_fails_to_decide_denies(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    def fails(call: ProposedCall, ctx: ToolContext) -> Decision:
        raise KeyError("oops")

    def talks(call: ProposedCall, ctx: ToolContext) -> Any:
        return "yes"

    for approval in (Approval(fails), Approval(talks), Approval(ask={"bash": pushes})):
        decided = await decide(approval, "bash")
        assert isinstance(decided, Deny)
        assert "approval check of this call failed" in decided.reason


async def test_cancelling_is_not_a_decision() -> None:
    async def hangs(call: ProposedCall, ctx: ToolContext) -> Decision:
        await asyncio.Event().wait()
        return "allow"

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await decide(Approval(hangs), "bash")


async def test_an_agents_option_may_be_short() -> None:
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
def test_what_is_no_policy_is_refused(value: object) -> None:
    with pytest.raises(InvalidOption):
        as_approval(value)
    with pytest.raises(InvalidOption, match="not a function"):
        Approval("bash")  # type: ignore[arg-type]


def test_a_rule_for_a_tool_that_does_not_exist_is_found() -> None:
    with pytest.raises(InvalidOption, match="Did you mean 'bash'"):
        Approval(ask=["bsah"]).check_names(["read", "bash"])
    with pytest.raises(InvalidOption, match="There are: read, bash"):
        Approval(deny={"zzz": "x"}).check_names(["read", "bash"])
    Approval(ask=["bash"], deny=["mcp__*"]).check_names(["read", "bash"])
