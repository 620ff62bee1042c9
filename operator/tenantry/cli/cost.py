"""`tenantry cost`: reads tenants and fleet from files, asks the pure model, prints tables, JSON or CSV."""

from __future__ import annotations

import csv
import io
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tenantry.cost import Crossover, Fleet, IdlePolicy, Report, Share, TenantTraffic, Topology, report

from .errors import CliError, first_problem, read_text
from .output import View, document
from .table import table


def run(tenants: Path, fleet: Path, policy: IdlePolicy, topology: Topology, output: str) -> str:
    """The whole command. Raises CliError."""
    traffic, machines = load_tenants(tenants), load_fleet(fleet)
    try:
        result = report(traffic, machines, policy, topology)
    except ValueError as error:
        raise CliError(str(error)) from error
    match output:
        case "json":
            return document(as_json(result), View.JSON)
        case "yaml":
            return document(as_json(result), View.YAML)
        case "csv":
            return as_csv(result)
        case _:
            return as_table(result)


def load_fleet(path: Path) -> Fleet:
    """Raises CliError."""
    try:
        return Fleet.model_validate(_yaml(read_text(path, "fleet file")))
    except ValidationError as error:
        raise CliError(f"fleet file `{path}`: {first_problem(error)}") from error


def load_tenants(path: Path) -> list[TenantTraffic]:
    """From YAML (`tenants:` with a list) or CSV (a column for every field). Raises CliError."""
    text = read_text(path, "tenants file")
    rows: Any
    if path.suffix == ".csv":
        rows = [_csv_row(row) for row in csv.DictReader(io.StringIO(text))]
    else:
        document = _yaml(text)
        rows = document.get("tenants") if isinstance(document, dict) else document
    if not isinstance(rows, list) or not rows:
        raise CliError(f"tenants file `{path}` must hold a list `tenants` with at least one entry")
    found: list[TenantTraffic] = []
    for index, row in enumerate(rows):
        try:
            found.append(TenantTraffic.model_validate(row))
        except ValidationError as error:
            raise CliError(f"tenants file `{path}`, entry {index + 1}: {first_problem(error)}") from error
    names = [tenant.name for tenant in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise CliError(f"tenants file `{path}` must name `{twice}` once")
    return found


def _csv_row(row: dict[str, Any]) -> dict[str, Any]:
    """Empty cells are absent fields; a trace is numbers separated by spaces."""
    filled = {key: value for key, value in row.items() if value not in (None, "")}
    if "trace" in filled:
        filled["trace"] = str(filled["trace"]).split()
    return filled


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CliError(f"the file must be YAML: {str(error).splitlines()[0]}") from error


def as_json(result: Report) -> dict[str, Any]:
    """Money as text, so that no reader rounds it."""
    fleet = result.fleet
    return {
        "currency": fleet.currency,
        "priceDate": fleet.price_date,
        "hours": fleet.hours,
        "idlePolicy": result.policy.value,
        "topology": result.topology.value,
        "bills": [
            {"topology": bill.topology.value, "replicas": bill.replicas, "total": str(bill.total)}
            for bill in result.bills
        ],
        "tenants": [_share(share) for share in result.shares],
        "total": str(result.total),
        "crossovers": [_crossover(found) for found in result.crossovers],
    }


def _share(share: Share) -> dict[str, Any]:
    def text(money: Decimal | None) -> str | None:
        return None if money is None else str(money)

    return {
        "tenant": share.tenant or "(unallocated)",
        "direct": str(share.direct),
        "idle": str(share.idle),
        "overhead": str(share.overhead),
        "storage": str(share.storage),
        "total": str(share.total),
        "utilisation": round(share.utilisation, 6),
        "perMillionInput": text(share.per_million_input),
        "perMillionCached": text(share.per_million_cached),
        "perMillionOutput": text(share.per_million_output),
    }


def _crossover(found: Crossover) -> dict[str, Any]:
    return {
        "tenant": found.tenant,
        "intervals": [
            {"fromTokensPerDay": i.begin, "toTokensPerDay": i.end, "saving": str(i.saving)}
            for i in found.intervals
        ],
        "scannedTo": found.scanned_to,
        "closedForm": found.closed_form,
        "closedFormHolds": found.closed_form_holds,
        "reason": found.reason,
    }


def as_csv(result: Report) -> str:
    """One row per tenant; the sum of `total` is the bill."""
    rows = [_share(share) for share in result.shares]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_table(result: Report) -> str:
    """For people."""
    fleet = result.fleet
    unit = fleet.currency
    parts = [
        f"{fleet.accelerator}, prices of {fleet.price_date}, {fleet.hours} hours, in {unit}",
        "",
        table(
            ["topology", "replicas", "bill"],
            [
                [f"{bill.topology.value}{' *' if bill.topology is result.topology else ''}", str(bill.replicas),
                 f"{bill.total:,}"]
                for bill in result.bills
            ],
        ),
        "",
        f"* who pays what, idle capacity {result.policy.value}; prices per million tokens",
        table(
            ["tenant", "direct", "idle", "overhead", "storage", "total", "used", "input", "cached", "output"],
            [_row(share) for share in result.shares]
            + [["sum", *[""] * 4, f"{result.total:,}", *[""] * 4]],
        ),
    ]  # fmt: skip
    if result.crossovers:
        parts += ["", "tokens per day from which a tenant of this shape costs no more alone"]
        parts.append(
            table(
                ["tenant", "by whole replicas", "by the formula", "why"],
                [_crossing(found) for found in result.crossovers],
            )
        )
    return "\n".join(parts) + "\n"


def _row(share: Share) -> list[str]:
    prices = (share.per_million_input, share.per_million_cached, share.per_million_output)
    return [
        share.tenant or "(unallocated)",
        *(f"{money:,}" for money in (share.direct, share.idle, share.overhead, share.storage, share.total)),
        f"{share.utilisation:.1%}",
        *("-" if price is None else f"{price:.3f}" for price in prices),
    ]


def _crossing(found: Crossover) -> list[str]:
    spans = [
        f"from {_tokens(i.begin)}" if i.end is None else f"{_tokens(i.begin)} to {_tokens(i.end)}"
        for i in found.intervals
    ]
    more = f", {len(spans) - 3} more" if len(spans) > 3 else ""
    formula = "-" if found.closed_form is None else _tokens(found.closed_form)
    return [
        found.tenant,
        "; ".join(spans[:3]) + more if spans else "none",
        formula if found.closed_form_holds else f"({formula})",
        found.reason,
    ]


def _tokens(count: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:.3g}"
