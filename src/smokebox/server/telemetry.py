"""Spans of requests, sent by OTLP. OpenTelemetry is only imported if an endpoint is set."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Self

from smokebox import __version__
from smokebox.errors import MissingDependency

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from smokebox.server.settings import ServerSettings

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TRACE_HEADERS = (b"traceparent", b"tracestate")


class Telemetry:
    """One span per request, a child of the caller's span if it sent one (W3C traceparent)."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("smokebox.server", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._kind = trace.SpanKind.SERVER
        self._error = trace.Status(trace.StatusCode.ERROR)

    @classmethod
    def open(cls, settings: ServerSettings) -> Self | None:
        """Return telemetry if the settings or the environment have an endpoint, else None."""
        configured = any(os.environ.get(name) for name in _VARIABLES)
        if settings.otlp_endpoint is None and not configured:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise MissingDependency(
                "an OTLP endpoint is set, and OpenTelemetry is not installed.",
                hint="Run: pip install 'smokebox[telemetry]', or unset " + _VARIABLES[1] + ".",
                package="opentelemetry-sdk",
                extra="telemetry",
            ) from error
        endpoint = settings.otlp_endpoint
        exporter = OTLPSpanExporter(endpoint and f"{endpoint.rstrip('/')}/v1/traces")
        attributes = {"service.version": __version__}
        # Attributes passed here override the environment, so leave out those that it sets.
        if "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
            attributes["service.name"] = os.environ.get("OTEL_SERVICE_NAME", "smokebox")
        resource = Resource.create(attributes)
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def begin(self, method: str, headers: dict[bytes, bytes]) -> Span:
        """Start the span of a request."""
        carrier = {
            name.decode(): headers[name].decode("latin-1")
            for name in _TRACE_HEADERS
            if name in headers
        }
        context = self._propagator.extract(carrier) if carrier else None
        return self._tracer.start_span(method, context=context, kind=self._kind)

    def end(
        self,
        span: Span,
        *,
        method: str,
        route: str,
        status: int,
        principal: str,
        sandbox: str | None,
        request_id: str,
    ) -> None:
        """End the span of a request, with the attributes of its response."""
        span.update_name(f"{method} {route}")
        span.set_attribute("http.request.method", method)
        span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("smokebox.principal", principal)
        span.set_attribute("smokebox.request_id", request_id)
        if sandbox is not None:
            span.set_attribute("smokebox.sandbox", sandbox)
        if status >= 500:
            span.set_status(self._error)
        span.end()

    async def aclose(self) -> None:
        """Send the remaining spans."""
        await asyncio.to_thread(self._provider.shutdown)
