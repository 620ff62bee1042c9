"""OpenTelemetry traces: a span for each reconcile, with the calls that it made below it.

Nothing is traced unless `OTEL_EXPORTER_OTLP_ENDPOINT` is set; OpenTelemetry's other variables apply as they stand.
Spans name objects, paths and answers' codes; never what was sent or received.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace

VARIABLE: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"


@contextmanager
def tracing() -> Iterator[None]:
    """Sends the spans of its block where the environment says, if it does; what is left goes out at its end."""
    if not os.environ.get(VARIABLE):
        yield
        return
    # What sends takes memory, and most run without it.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "tenantry-operator"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()
