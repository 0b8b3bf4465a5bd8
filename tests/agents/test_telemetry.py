"""Tests of OpenTelemetry spans and metrics of agents."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

PROGRAM = """
import json, sys
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider([reader]))

from smokebox.agents.messages import AssistantMessage, Text, Usage
from smokebox.agents.telemetry import span_agent, span_chat, span_tool
from smokebox.errors import ModelUnavailable

{body}

data = reader.get_metrics_data()
points = [
    {{"name": metric.name, "count": point.count, "sum": point.sum, **point.attributes}}
    for resource in data.resource_metrics
    for scope in resource.scope_metrics
    for metric in scope.metrics
    for point in metric.data.data_points
]
out = [
    {{
        "name": span.name,
        "kind": span.kind.name,
        "parent": span.parent and span.parent.span_id,
        "id": span.context.span_id,
        "status": span.status.status_code.name,
        **dict(span.attributes),
    }}
    for span in spans.get_finished_spans()
]
print(json.dumps([out, points]))
"""

TURN = """
usage = Usage(
    requests=1, input_tokens=10, output_tokens=4, cache_read_tokens=6,
    cache_write_tokens=1, cost=0.5
)
message = AssistantMessage(parts=(Text("hi"),), model="anthropic/claude-x", usage=usage)
with span_agent("reviewer", session="s1", model="anthropic/claude-x") as work:
    with span_chat("anthropic/claude-x") as chat:
        chat.replied(message)
    with span_tool("bash", call_id="c1") as tool:
        tool.failed("timeout")
    work.used(usage)
"""


def collect(body: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run a program with its own providers, and return spans and metric points.

    A separate process, as providers can be set only once.
    """
    program = PROGRAM.format(body=textwrap.dedent(body))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    spans, points = json.loads(done.stdout)
    return spans, points


def test_request_and_tool_spans_are_children_of_the_agent_span() -> None:
    spans, points = collect(TURN)
    chat, tool, work = spans
    assert [span["name"] for span in spans] == [
        "chat claude-x",
        "execute_tool bash",
        "invoke_agent reviewer",
    ]
    assert {chat["parent"], tool["parent"]} == {work["id"]}
    assert work["gen_ai.conversation.id"] == "s1"
    assert (chat["kind"], chat["gen_ai.provider.name"]) == ("CLIENT", "anthropic")
    assert chat["gen_ai.response.finish_reasons"] == ["end"]
    assert chat["gen_ai.usage.cache_read.input_tokens"] == 6
    assert chat["smokebox.cost_usd"] == 0.5
    assert (tool["status"], tool["error.type"]) == ("ERROR", "timeout")
    tokens = [point for point in points if point["name"] == "gen_ai.client.token.usage"]
    assert {(point["gen_ai.token.type"], point["sum"]) for point in tokens} == {
        ("input", 10),
        ("output", 4),
    }
    durations = [p for p in points if p["name"] == "gen_ai.client.operation.duration"]
    assert {point["gen_ai.operation.name"] for point in durations} == {
        "chat",
        "execute_tool",
        "invoke_agent",
    }


def test_span_records_the_code_of_an_exception() -> None:
    spans, _ = collect("""
        try:
            with span_chat("openai/gpt"):
                raise ModelUnavailable("overloaded", model="openai/gpt")
        except ModelUnavailable:
            pass
        else:
            raise SystemExit("it was swallowed")
    """)
    assert [(span["status"], span["error.type"]) for span in spans] == [
        ("ERROR", "model_unavailable")
    ]


def test_nothing_is_imported_without_a_collector() -> None:
    program = """
import sys
from smokebox.agents.telemetry import span_agent, span_chat, span_tool
with span_agent("a", session="s", model="m"), span_chat("m"), span_tool("t", call_id="c") as tool:
    tool.failed("timeout")
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    environ = {"PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=environ)


AGENT = """
import asyncio
from smokebox import create_agent, init
from smokebox.testing import ScriptedModel, call

async def work():
    model = ScriptedModel(call("bash", command="true"), call("task", prompt="x"), "child", "done")
    async with init(create_agent(name="lead", model=model, persist=False)) as harness:
        await (await harness.session()).prompt("go")

asyncio.run(work())
"""


def test_spans_of_tasks_are_nested() -> None:
    spans, points = collect(AGENT)
    names = {span["id"]: span["name"] for span in spans}
    tree = sorted((span["name"], names.get(span["parent"], "")) for span in spans)
    assert tree == [
        ("chat model", "invoke_agent lead"),
        ("chat model", "invoke_agent lead"),
        ("chat model", "invoke_agent lead"),
        ("chat model", "invoke_agent lead"),
        ("execute_tool bash", "invoke_agent lead"),
        ("execute_tool task", "invoke_agent lead"),
        ("invoke_agent lead", ""),
        ("invoke_agent lead", "execute_tool task"),
    ]
    assert {point["name"] for point in points} == {
        "gen_ai.client.token.usage",
        "gen_ai.client.operation.duration",
    }
