"""What the cost model is told: who sends how much, and what a replica can do for which price."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Self

from pydantic import Field, model_validator

from tenantry.api.common import DnsLabel, Model, Tier

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Money = Annotated[Decimal, Field(ge=0, max_digits=12, decimal_places=6)]


class TenantTraffic(Model):
    """Mean traffic of a tenant. Work is linear in tokens, so that means of lengths are enough.

    Burstiness is either a `trace` (relative load of equal periods, e.g. 24 hours; only its shape counts) or
    `peakToAverage` of bursts that are independent of those of all others.
    """

    name: DnsLabel
    tier: Tier
    requests_per_second: Amount
    input_tokens: Amount
    cached_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    output_tokens: Amount
    peak_to_average: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    trace: Annotated[tuple[Amount, ...], Field(max_length=8784)] = ()
    adapter_bytes: Annotated[int, Field(ge=0)] = 0
    loads_per_hour: Amount = 0.0

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if self.trace and self.peak_to_average != 1.0:
            raise ValueError("`trace` and `peakToAverage` must not be given both")
        if self.trace and sum(self.trace) <= 0:
            raise ValueError("`trace` must have a load somewhere")
        return self

    @property
    def tokens_per_day(self) -> float:
        """Input, cached and output tokens together."""
        return 86_400 * self.requests_per_second * (self.input_tokens + self.output_tokens)

    def scaled(self, factor: float) -> TenantTraffic:
        """The same tenant with `factor` times the requests (and adapter loads)."""
        return self.model_copy(
            update={
                "requests_per_second": self.requests_per_second * factor,
                "loads_per_hour": self.loads_per_hour * factor,
            }
        )


class Rates(Model):
    """Tokens per second of one replica at the SLO, each kind alone, with that many adapters resident."""

    adapters: Annotated[int, Field(ge=0)] = 0
    input: Positive
    cached: Positive
    output: Positive


class Fleet(Model):
    """What replicas do and cost. Prices are those of `priceDate`; money has the unit of `currency`."""

    accelerator: Annotated[str, Field(min_length=1, max_length=64)]
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    price_date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
    price_per_hour: Money
    dedicated_price_per_hour: Money | None = None
    commitment_discount: Annotated[Decimal, Field(ge=0, lt=1)] = Decimal(0)
    accelerators_per_replica: Annotated[int, Field(ge=1, le=64)] = 1
    rates: Annotated[tuple[Rates, ...], Field(min_length=1, max_length=64)]
    max_resident_adapters: Annotated[int, Field(ge=1)] | None = None
    max_utilisation: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_replicas: Annotated[int, Field(ge=0)] = 1
    spare_replicas: Annotated[int, Field(ge=0)] = 0
    confidential_overhead: Annotated[float, Field(ge=0, lt=1)] = 0.0
    load_seconds: Amount = 0.0
    storage_per_gib_month: Money = Decimal(0)
    hours: Annotated[int, Field(ge=1, le=8784)] = 730

    @model_validator(mode="after")
    def _rising(self) -> Self:
        points = [rates.adapters for rates in self.rates]
        if points != sorted(set(points)):
            raise ValueError("`rates` must be sorted by `adapters`, each once")
        return self

    def price(self, *, dedicated: bool) -> Decimal:
        """Money for one replica and hour in that topology."""
        price = self.price_per_hour
        if dedicated and self.dedicated_price_per_hour is not None:
            price = self.dedicated_price_per_hour
        return price * self.accelerators_per_replica * (1 - self.commitment_discount)

    def rates_at(self, adapters: int) -> Rates:
        """Rates with that many adapters in a pool: linear between measured points, never guessed beyond the last.

        Adapters take memory from the KV cache, so more of them mean smaller batches. Raises ValueError.
        """
        resident = min(adapters, self.max_resident_adapters or adapters)
        last = self.rates[-1]
        if resident > last.adapters and len(self.rates) > 1:
            raise ValueError(
                f"`rates` must be measured up to {resident} adapters, or `maxResidentAdapters` be at most "
                f"{last.adapters}"
            )
        for low, high in zip(self.rates, self.rates[1:], strict=False):
            if low.adapters <= resident <= high.adapters:
                part = (resident - low.adapters) / (high.adapters - low.adapters)
                return Rates(
                    adapters=resident,
                    input=low.input + part * (high.input - low.input),
                    cached=low.cached + part * (high.cached - low.cached),
                    output=low.output + part * (high.output - low.output),
                )
        return self.rates[0]
