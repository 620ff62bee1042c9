"""What a replica measures. vLLM's names where they mean the same, so that its dashboards and autoscalers work.

Residency and activity are separate series: how many adapters are in pages says nothing about how many are in use.
No series is labelled by adapter or tenant: there may be thousands.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tenantry_engine.ipc.messages import Ran
from tenantry_engine.server.answer import Answer

_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The series of one replica."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        label = ["model_name"]

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, label, registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, label, registry=self.registry, buckets=_SECONDS)

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, [*label, *more], registry=self.registry)

        self._running = gauge("vllm:num_requests_running", "Sequences that hold pages")
        self._waiting = gauge("vllm:num_requests_waiting", "Sequences that wait for admission")
        self._usage = gauge("vllm:kv_cache_usage_perc", "Share of the pool's pages in use, 0 to 1")
        self._prompt = counter("vllm:prompt_tokens", "Input tokens of ended requests")
        self._generated = counter("vllm:generation_tokens", "Output tokens of ended requests")
        self._success = counter("vllm:request_success", "Ended requests", "finished_reason")
        self._preempted = counter("vllm:num_preemptions", "Sequences that gave their pages to others")
        self._preemptions_seen = 0
        self._evicted = counter(
            "tenantry_engine_adapter_evictions", "Adapters that gave their pages to others"
        )
        self._evictions_seen = 0
        self._asked_tokens = counter("vllm:prefix_cache_queries", "Input tokens of requests that were begun")
        self._cached_tokens = counter("vllm:prefix_cache_hits", "Input tokens found in the prefix cache")
        self._first = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token")
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Of one request, from token to token after the first",
        )
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end")
        self._step = histogram("tenantry_engine_step_seconds", "One step of the engine")
        self._rows = histogram_of_counts(
            "tenantry_engine_step_tokens", "Tokens in a step", label, self.registry
        )
        self._distinct = histogram_of_counts(
            "tenantry_engine_step_adapters", "Distinct adapters in a step", label, self.registry
        )
        self._prompt_sizes = histogram_of_counts(
            "vllm:request_prompt_tokens", "Input tokens of a request", label, self.registry
        )
        self._answer_sizes = histogram_of_counts(
            "vllm:request_generation_tokens", "Output tokens of a request", label, self.registry
        )
        self._pages = Gauge(
            "tenantry_engine_pages", "Pages of the pool", [*label, "state"], registry=self.registry
        )
        self._adapters = Gauge(
            "tenantry_engine_adapters",
            "Adapters known to this replica",
            [*label, "state"],
            registry=self.registry,
        )

    def step(self, ran: Ran) -> None:
        """A step ended."""
        self._step.labels(self._model).observe(ran.seconds)
        self._rows.labels(self._model).observe(ran.rows)
        self._distinct.labels(self._model).observe(ran.adapters)

    def ended(self, answer: Answer, reason: str, seconds: float) -> None:
        """A request ended, `seconds` after it came."""
        usage = answer.usage()
        prompt, generated = usage["prompt_tokens"], usage["completion_tokens"]
        self._prompt.labels(self._model).inc(prompt)
        self._generated.labels(self._model).inc(generated)
        self._success.labels(self._model, reason).inc()
        self._whole.labels(self._model).observe(seconds)
        self._prompt_sizes.labels(self._model).observe(prompt)
        self._answer_sizes.labels(self._model).observe(generated)
        if answer.first_token is None:
            return
        self._first.labels(self._model).observe(answer.first_token)
        self._asked_tokens.labels(self._model).inc(prompt)
        self._cached_tokens.labels(self._model).inc(usage["prompt_tokens_details"]["cached_tokens"])
        each = generated / len(answer.choices)
        if each > 1:
            self._per_token.labels(self._model).observe((seconds - answer.first_token) / (each - 1))

    def look(self, numbers: dict[str, Any]) -> None:
        """Takes in the engine's numbers of now."""
        pages = numbers["pages"]
        self._running.labels(self._model).set(numbers["running"])
        self._waiting.labels(self._model).set(numbers["waiting"])
        self._usage.labels(self._model).set((pages["kv"] + pages["adapter"]) / pages["total"])
        self._preempted.labels(self._model).inc(numbers["preemptions"] - self._preemptions_seen)
        self._preemptions_seen = numbers["preemptions"]
        self._evicted.labels(self._model).inc(numbers["evictions"] - self._evictions_seen)
        self._evictions_seen = numbers["evictions"]
        for state, count in pages.items():
            if state != "total":
                self._pages.labels(self._model, state).set(count)
        for state in ("registered", "resident", "active"):
            self._adapters.labels(self._model, state).set(numbers[state])

    def render(self) -> bytes:
        """The text form."""
        return generate_latest(self.registry)


def histogram_of_counts(name: str, text: str, labels: list[str], registry: CollectorRegistry) -> Histogram:
    """A histogram of small whole numbers."""
    return Histogram(
        name,
        text,
        labels,
        registry=registry,
        buckets=(0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    )
