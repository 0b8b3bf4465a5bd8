"""OpenTelemetry spans and metrics of agents, by the GenAI conventions.

They are sent if the program has set a tracer provider, or the environment names a collector
(`OTEL_EXPORTER_OTLP_ENDPOINT`). Otherwise a hook costs about a microsecond. Text of a
conversation is never sent: only names, numbers and outcomes.

    with span_agent("reviewer", session=session.id, model=model.name) as work:
        with span_chat(model.name) as chat:
            chat.replied(message)
        with span_tool("bash", call_id=call.id) as tool:
            tool.failed("timeout")
        work.used(usage)
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Self

from smokebox import __version__
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import SpanKind, TracerProvider
    from opentelemetry.util.types import AttributeValue

    from smokebox.agents.messages import AssistantMessage, Usage

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_NAME = "smokebox.agents"
# Buckets that the conventions require: powers of four for tokens, of two for seconds.
_TOKENS = tuple(4**power for power in range(14))
_SECONDS = tuple(0.01 * 2**power for power in range(14))


class Span:
    """Span of one operation, used with `with`. This base class sends nothing."""

    __slots__ = ()

    def replied(self, message: AssistantMessage) -> None:
        """Record the response of a model."""

    def used(self, usage: Usage) -> None:
        """Record the usage of requests to models."""

    def failed(self, kind: str) -> None:
        """Record a failure that raised nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


_SILENT = Span()


def span_agent(agent: str, *, session: str, model: str) -> Span:
    """Return the span of a work item of an agent."""
    telemetry = _telemetry()
    if telemetry is None:
        return _SILENT
    return telemetry.start(
        "invoke_agent",
        agent,
        model,
        {"gen_ai.agent.name": agent, "gen_ai.conversation.id": session},
    )


def span_chat(model: str) -> Span:
    """Return the span of a request to a model."""
    telemetry = _telemetry()
    if telemetry is None:
        return _SILENT
    return telemetry.start("chat", model.partition("/")[2] or model, model, {})


def span_tool(tool: str, *, call_id: str) -> Span:
    """Return the span of a tool call."""
    telemetry = _telemetry()
    if telemetry is None:
        return _SILENT
    return telemetry.start(
        "execute_tool",
        tool,
        None,
        {
            "gen_ai.tool.name": tool,
            "gen_ai.tool.call.id": call_id,
            "gen_ai.tool.type": "function",
        },
    )


class _RecordedSpan(Span):
    """Span that is sent, and the parent of spans that start before it ends."""

    __slots__ = ("_error", "_labels", "_manager", "_span", "_started", "_telemetry")

    def __init__(
        self,
        telemetry: _Telemetry,
        name: str,
        attributes: dict[str, AttributeValue],
        kind: SpanKind,
    ) -> None:
        self._telemetry = telemetry
        self._started = time.perf_counter()
        self._labels = {key: attributes[key] for key in _LABELS if key in attributes}
        self._error: str | None = None
        self._manager = telemetry.tracer.start_as_current_span(
            name,
            kind=kind,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        )

    def __enter__(self) -> Self:
        self._span = self._manager.__enter__()
        return self

    def replied(self, message: AssistantMessage) -> None:
        self._span.set_attribute("gen_ai.response.model", message.model.partition("/")[2])
        self._span.set_attribute("gen_ai.response.finish_reasons", (message.stop,))
        self.used(message.usage)
        for kind in ("input", "output"):
            tokens = getattr(message.usage, f"{kind}_tokens")
            self._telemetry.tokens.record(tokens, {**self._labels, "gen_ai.token.type": kind})

    def used(self, usage: Usage) -> None:
        numbers: dict[str, AttributeValue] = {
            "gen_ai.usage.input_tokens": usage.input_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cache_read_tokens,
            "gen_ai.usage.cache_creation.input_tokens": usage.cache_write_tokens,
        }
        if usage.cost is not None:
            numbers["smokebox.cost_usd"] = usage.cost
        self._span.set_attributes(numbers)

    def failed(self, kind: str) -> None:
        self._error = kind

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._error = error.code if isinstance(error, SmokeboxError) else type(error).__name__
        if self._error is not None:
            self._span.set_attribute("error.type", self._error)
            self._span.set_status(self._telemetry.error)
            self._labels["error.type"] = self._error
        self._manager.__exit__(None, None, None)
        self._telemetry.seconds.record(time.perf_counter() - self._started, self._labels)


_LABELS = (
    "gen_ai.operation.name",
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "gen_ai.tool.name",
    "gen_ai.agent.name",
)


class _Telemetry:
    """Tracer and instruments of one tracer provider and meter provider."""

    def __init__(self, tracers: TracerProvider, meters: MeterProvider) -> None:
        from opentelemetry import trace

        self.tracers = tracers
        self.tracer = tracers.get_tracer(_NAME, __version__)
        self.error = trace.Status(trace.StatusCode.ERROR)
        self._client, self._internal = trace.SpanKind.CLIENT, trace.SpanKind.INTERNAL
        meter = meters.get_meter(_NAME, __version__)
        self.tokens: Histogram = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )
        self.seconds: Histogram = meter.create_histogram(
            "gen_ai.client.operation.duration",
            unit="s",
            description="GenAI operation duration.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )

    def start(
        self, operation: str, name: str, model: str | None, extra: Mapping[str, AttributeValue]
    ) -> Span:
        """Return a span of an operation; `model` is `provider/model`."""
        attributes: dict[str, AttributeValue] = {"gen_ai.operation.name": operation, **extra}
        if model is not None:
            provider, _, rest = model.partition("/")
            attributes["gen_ai.provider.name"] = provider
            attributes["gen_ai.request.model"] = rest or model
        kind = self._client if operation == "chat" else self._internal
        return _RecordedSpan(self, f"{operation} {name}", attributes, kind)


_env_telemetry: _Telemetry | None = None
_opened = False
_program_telemetry: _Telemetry | None = None


def _telemetry() -> _Telemetry | None:
    """Return the telemetry in use, if any; the program's providers override the environment."""
    global _env_telemetry, _opened, _program_telemetry
    if (trace := sys.modules.get("opentelemetry.trace")) is not None:
        tracers = trace.get_tracer_provider()
        if not isinstance(tracers, trace.ProxyTracerProvider):
            if _program_telemetry is None or _program_telemetry.tracers is not tracers:
                from opentelemetry import metrics

                _program_telemetry = _Telemetry(tracers, metrics.get_meter_provider())
            return _program_telemetry
    if not _opened and any(os.environ.get(name) for name in _VARIABLES):
        _env_telemetry, _opened = _open(), True
    return _env_telemetry


def _open() -> _Telemetry | None:
    """Create providers that send by OTLP to the collector that the environment names."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        # The variable may be meant for other programs, so it is no reason to fail.
        logging.getLogger("smokebox.agents").warning(
            "%s is set, and OpenTelemetry is not installed: agents send nothing. "
            "Run: pip install 'smokebox[telemetry]'",
            _VARIABLES[1],
        )
        return None
    resource = Resource.create({"service.version": __version__})
    tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    atexit.register(meters.shutdown)
    atexit.register(tracers.shutdown)
    return _Telemetry(tracers, meters)
