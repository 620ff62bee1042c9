"""What shared and dedicated serving cost, per tenant, and where they cross. Pure: numbers in, numbers out.

`inputs` (what is asked) -> `capacity` (work, peaks, whole replicas) -> `bill` (money of a topology) -> `allocate`
(whose money) -> `crossover` (shared or dedicated) -> `report` (all of it for people and programs).
"""

from .allocate import IdlePolicy, Share, allocate, apportion
from .bill import Bill, Topology, bill_of, price_pool
from .capacity import peak, replicas, work
from .crossover import Crossover, Interval, crossover
from .inputs import Fleet, Rates, TenantTraffic
from .report import Report, report

__all__ = [
    "Bill",
    "Crossover",
    "Fleet",
    "IdlePolicy",
    "Interval",
    "Rates",
    "Report",
    "Share",
    "TenantTraffic",
    "Topology",
    "allocate",
    "apportion",
    "bill_of",
    "crossover",
    "peak",
    "price_pool",
    "replicas",
    "report",
    "work",
]
