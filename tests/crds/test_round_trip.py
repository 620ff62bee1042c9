"""Whatever the models write comes back from the real API server unchanged: nothing pruned, nothing defaulted away."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.rest import Rest
from tenantry.api.kinds import ADAPTER, ADAPTER_POOL, KINDS, TENANT, Kind

from . import samples
from .instances import Object, document, objects

pytestmark = pytest.mark.apiserver

_SETTINGS = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("full", [True, False], ids=["every field", "some fields"])
def test_round_trip(rest: Rest, kind: Kind, full: bool) -> None:
    @_SETTINGS
    @given(st.data())
    def check(data: st.DataObject) -> None:
        spec, status = data.draw(objects(kind, full))
        written = document(kind, "round-trip", spec)
        try:
            assert rest.apply(written).complaint == ""
            assert rest.apply({**_bare(written), "status": status}, part="/status").complaint == ""
            stored = rest.get(written)
            assert stored["spec"] == spec
            assert stored["status"] == status
            assert kind.spec.model_validate(stored["spec"]).wire() == spec
        finally:
            rest.delete(written)

    check()


def _bare(written: Object) -> Object:
    return {key: value for key, value in written.items() if key != "spec"}


@pytest.mark.parametrize(
    ("kind", "written"),
    [(TENANT, samples.tenant("d-t")), (ADAPTER_POOL, samples.pool("d-p")), (ADAPTER, samples.adapter("d-a"))],
    ids=["Tenant", "AdapterPool", "Adapter"],
)
def test_defaults_are_those_of_the_models(rest: Rest, kind: Kind, written: Object) -> None:
    """What the API server fills in is what the operator would read without it."""
    assert rest.apply(written).complaint == ""
    stored = rest.get(written)["spec"]
    assert kind.spec.model_validate(stored) == kind.spec.model_validate(written["spec"])
    rest.delete(written)


def test_pool_defaults_are_stored(rest: Rest) -> None:
    """A later release's defaults must not change a running pool, so they are in the object."""
    written = samples.pool("d-stored")
    assert rest.apply(written).complaint == ""
    spec = rest.get(written)["spec"]
    rest.delete(written)
    assert spec["engine"] == {
        "type": "Tenantry",
        "dtype": "bfloat16",
        "maxModelLen": 2048,
        "tensorParallel": 1,
        "resources": {"cpu": "1", "memory": "2Gi", "acceleratorCount": 0},
    }
    assert spec["lanes"] == [{"name": "fast", "replicas": {"min": 1}, "slots": 16}]
    assert spec["placement"] == {
        "replicasPerTenant": 2,
        "maxTenantsPerReplica": 1000,
        "headroomPercent": 0,
    }


def test_a_new_object_is_observed_by_nobody(rest: Rest) -> None:
    """Argo CD and kstatus must not take a new object for a finished one; a status sent at creation is dropped."""
    written = {**samples.tenant("d-new"), "status": {"observedGeneration": 1}}
    assert rest.create(written).complaint == ""
    stored = rest.get(written)
    rest.delete(written)
    assert stored["status"] == {"observedGeneration": -1}
    assert "isolation" not in stored["spec"]
