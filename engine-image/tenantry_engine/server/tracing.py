"""OpenTelemetry traces: one span a request, below the caller's where it sent a `traceparent`.

Nothing is traced unless `OTEL_EXPORTER_OTLP_ENDPOINT` (or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`) is set;
OpenTelemetry's other variables apply as they stand. Spans hold sizes, times and names under the conventions for
generative AI; never a prompt's or an answer's text, and never a token of an identity.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tenantry_engine.errors import EngineError
from tenantry_engine.server.answer import Answer

_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_propagator = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("tenantry_engine")


def configured() -> str | None:
    """Where traces go; None = nowhere."""
    return next((value for name in reversed(_VARIABLES) if (value := os.environ.get(name))), None)


@contextmanager
def tracing() -> Iterator[str | None]:
    """Sends the spans of its block where the environment says; yields that address.

    Raises EngineError when there is one, but not the packages that can send.
    """
    endpoint = configured()
    if endpoint is None:
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise EngineError(
            f"`{_VARIABLES[0]}` must be unset here, or the extra `tracing` be installed: "
            "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "tenantry-engine"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        yield endpoint
    finally:
        provider.shutdown()


@contextmanager
def caller_of(headers: Mapping[str, str]) -> Iterator[None]:
    """Spans that begin in the block are the caller's children."""
    if "traceparent" not in headers:
        yield
        return
    token = context.attach(_propagator.extract(headers))
    try:
        yield
    finally:
        context.detach(token)


def begin_span(answer: Answer) -> Span:
    """A request was accepted."""
    operation = "chat" if answer.chat else "text_completion"
    return _tracer.start_span(
        f"{operation} {answer.served}",
        kind=SpanKind.SERVER,
        attributes={
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": answer.served,
            "gen_ai.response.id": answer.id,
            "gen_ai.request.choice.count": len(answer.choices),
        },
    )


def end_span(span: Span, answer: Answer, reason: str) -> None:
    """It ended."""
    if not span.is_recording():
        return
    usage = answer.usage()
    span.set_attribute("gen_ai.usage.input_tokens", usage["prompt_tokens"])
    span.set_attribute("gen_ai.usage.output_tokens", usage["completion_tokens"])
    span.set_attribute(
        "gen_ai.usage.cache_read.input_tokens", usage["prompt_tokens_details"]["cached_tokens"]
    )
    span.set_attribute(
        "gen_ai.response.finish_reasons", [choice.finish or "abort" for choice in answer.choices]
    )
    if answer.first_token is not None:
        span.set_attribute("gen_ai.latency.time_to_first_token", answer.first_token)
    if reason == "abort":
        span.set_status(Status(StatusCode.ERROR, "ended before it was complete"))
    span.end()
