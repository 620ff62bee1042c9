"""vLLM's endpoints to load and unload adapters: they do what they say, and reach nothing outside their folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_world as world
import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from server_world import Served
from tenantry_engine.config import LoraConfig
from tenantry_engine.digest import MAX_CONFIG_BYTES
from tenantry_engine.identity import GATEWAY, Verifier

LIMIT = 1 << 20


@pytest.fixture(scope="module")
def served(tiny: world.TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    good = tiny.adapter("lora-good", 91, r=4)
    shutil.copytree(good, folder / "good")
    shutil.copytree(tiny.adapter("lora-other", 92, r=4), folder / "other")
    shutil.copytree(tiny.adapter("lora-big", 93, r=40), folder / "big")
    shutil.copytree(good, folder / "broken")
    weights = folder / "broken" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    (folder / "empty").mkdir()
    (folder / "link").symlink_to(good)
    (folder / "part").mkdir()
    shutil.copy(good / "adapter_config.json", folder / "part")
    (folder / "part" / "adapter_model.safetensors").symlink_to(good / "adapter_model.safetensors")
    shutil.copytree(good, folder / "huge")
    (folder / "huge" / "adapter_model.safetensors").write_bytes(bytes(LIMIT + MAX_CONFIG_BYTES))
    root = tmp_path_factory.mktemp("root") / "adapters"
    root.symlink_to(folder)
    lora = LoraConfig(max_rank=32, max_bytes=LIMIT)
    made = Served(tiny.folder, tmp_path_factory.mktemp("data"), None, adapters=root, lora=lora)
    yield made
    made.close()


def load(served: Served, name: str, path: str) -> httpx.Response:
    return served.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


def unload(served: Served, name: str) -> httpx.Response:
    return served.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def ask(served: Served, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "the fox", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return served.http.post("/v1/completions", json=body)


def free_pages(served: Served) -> int:
    return served.engine.call(served.engine.pool.counts).result(timeout=60).free


def test_load_serve_unload(served: Served) -> None:
    base = ask(served, "base").json()["choices"][0]["text"]
    free = free_pages(served)
    assert load(served, "a", "good").status_code == 200
    assert load(served, "b", f"{served.adapters}/other").status_code == 200
    assert load(served, "a", "./good/../good").status_code == 200, "the same again"
    texts = {name: ask(served, name).json()["choices"][0]["text"] for name in ("a", "b")}
    assert len({base, *texts.values()}) == 3
    taken = load(served, "a", "other")
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")
    assert ask(served, "a").json()["choices"][0]["text"] == texts["a"]
    assert unload(served, "a").status_code == 200
    assert ask(served, "a").status_code == 404
    assert unload(served, "a").status_code == 404
    assert ask(served, "b").json()["choices"][0]["text"] == texts["b"]
    assert unload(served, "b").status_code == 200
    world.wait_for(lambda: free_pages(served) == free)


def declared(served: Served) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in served.admin.get("/admin/v1/adapters").json()["adapters"]}


def test_a_load_leaves_the_other_names_as_they_were_declared(served: Served) -> None:
    digest = world.folder_digest(served.adapters / "good")
    kept = {"name": "kept", "digest": digest, "tenant": "t", "pinned": True}
    body = {"fence": {"epoch": 0, "counter": 0}, "adapters": [kept], "drainSeconds": 60}
    assert served.admin.put("/admin/v1/adapters", json=body).status_code == 200
    assert load(served, "a", "other").status_code == 200
    assert kept.items() <= declared(served)["kept"].items()
    assert unload(served, "a").status_code == 200
    assert kept.items() <= declared(served)["kept"].items()
    assert unload(served, "kept").status_code == 200
    world.wait_for(lambda: not declared(served))


def test_a_load_brings_back_no_name_that_is_leaving(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(served, "a", "good").status_code == 200
    with monkeypatch.context() as patched:
        patched.setattr(
            served.engine.registry, "sweep", lambda now, in_flight: []
        )  # as if requests still ran
        assert unload(served, "a").status_code == 200
        assert load(served, "b", "other").status_code == 200
        assert declared(served)["a"]["state"] == "Draining"
        assert ask(served, "a").status_code == 404
        assert unload(served, "a").status_code == 404
    assert unload(served, "b").status_code == 200
    world.wait_for(lambda: not declared(served))


def test_an_adapter_beyond_the_size_that_the_pool_takes_is_refused(served: Served) -> None:
    answer = load(served, "x", "huge")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert not declared(served)
    assert load(served, "x", "good").status_code == 200, "the name is free again"
    assert unload(served, "x").status_code == 200


@pytest.mark.parametrize("path", ["missing", "empty", "../data", "/etc", "link", "part", "good\0", ".", "~"])
def test_what_is_not_in_the_folder_is_not_found(served: Served, path: str) -> None:
    answer = load(served, "x", path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "adapter_not_found")
    assert ask(served, "x").status_code == 404


@pytest.mark.parametrize(("path", "says"), [("big", "RankTooLarge"), ("broken", "must")])
def test_an_adapter_that_does_not_fit_is_refused_at_once(served: Served, path: str, says: str) -> None:
    answer = load(served, "x", path)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert ask(served, "x").status_code == 404
    assert load(served, "x", "good").status_code == 200, "the name is free again"
    assert unload(served, "x").status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "../x", "lora_path": "good"}, None),
    ],
)
def test_bad_bodies(served: Served, body: dict[str, Any], param: str | None) -> None:
    answer = served.http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert param is None or answer.json()["error"]["param"] == param


def test_with_identities_the_operator_alone_declares(tiny: world.TinyModel, tmp_path: Path) -> None:
    world.certify(tmp_path / "certs", GATEWAY, Ed25519PrivateKey.generate())
    served = Served(
        tiny.folder, tmp_path / "data", Verifier("pool", tmp_path / "certs"), adapters=tiny.folder
    )
    try:
        for path in ("load", "unload"):
            body = json.dumps({"lora_name": "x", "lora_path": "x"})
            answer = served.http.post(f"/v1/{path}_lora_adapter", content=body)
            assert answer.status_code == 403
            assert "operator" in answer.json()["error"]["message"]
    finally:
        served.close()


@pytest.mark.parametrize(
    "more", [{"adapters": None}, {"adapters": Path(), "lora": None}], ids=["no folder", "no LoRA"]
)
def test_an_engine_that_takes_no_adapters_by_path_says_so(
    tiny: world.TinyModel, tmp_path: Path, more: dict[str, Any]
) -> None:
    served = Served(tiny.folder, tmp_path / "data", None, **more)
    try:
        for answer in (load(served, "x", "good"), unload(served, "x")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_served_here")
            assert "`--adapters`" in answer.json()["error"]["message"]
    finally:
        served.close()
