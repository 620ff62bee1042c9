"""Adapters that cannot be served exactly as they say are refused with a reason; hostile files do no harm."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from pathlib import Path
from typing import Any

import engine_world as world
import pytest
import torch
from safetensors.torch import load_file, save_file
from tenantry_engine.adapters.base import Base, weights_of
from tenantry_engine.adapters.check import CheckedAdapter, check
from tenantry_engine.adapters.peft_config import parse, resolve
from tenantry_engine.adapters.registry import Declaration
from tenantry_engine.adapters.safetensors_file import PIECE, is_finite
from tenantry_engine.adapters.store import BlobStore, DigestMismatchError, TooLargeError
from tenantry_engine.config import PROJECTIONS, EngineConfig, LoraConfig
from tenantry_engine.digest import folder_blob
from tenantry_engine.errors import AdapterError, RequestError
from tenantry_engine.loader import Weights
from tenantry_engine.models import load_model

GOOD = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def base(tiny: world.TinyModel) -> Base:
    with Weights(tiny.folder, torch.float32) as weights:
        model = load_model(weights)
    return Base(
        model.lora_shape,
        model.kv_shape.page_elems,
        torch.float32,
        100,
        tied=True,
        weight=weights_of(tiny.folder),
    )


@pytest.fixture(scope="module")
def good(tiny: world.TinyModel) -> Path:
    return tiny.adapter("good", 50, **GOOD)


def checked(folder: Path, base: Base, limits: LoraConfig | None = None, **config: Any) -> CheckedAdapter:
    """The check on a folder, with fields of its configuration replaced."""
    raw = json.loads((folder / "adapter_config.json").read_text()) | config
    return checked_bytes(
        json.dumps(raw).encode(), (folder / "adapter_model.safetensors").read_bytes(), base, limits
    )


def checked_bytes(
    config: bytes, weights: bytes, base: Base, limits: LoraConfig | None = None
) -> CheckedAdapter:
    blob = struct.pack("<Q", len(config)) + config + struct.pack("<Q", len(weights)) + weights
    return check(memoryview(blob), base, limits or LoraConfig())


def refused(reason: str, text: str | None, call: Any) -> None:
    with pytest.raises(AdapterError, match=text) as caught:
        call()
    assert caught.value.reason == reason, caught.value.message


def edited(folder: Path, target: Path, edit: Any) -> Path:
    """A copy of a folder with its tensors edited."""
    tensors = load_file(str(folder / "adapter_model.safetensors"))
    edit(tensors)
    target.mkdir()
    save_file(tensors, str(target / "adapter_model.safetensors"))
    (target / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    return target


def test_a_good_one(good: Path, base: Base) -> None:
    found = checked(good, base)
    assert found.rank == 4
    assert found.plan.pages > 0
    assert {scale for row in found.scales for scale in row} == {0.0, 2.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [1, 2]),
        ("trainable_token_indices", [5]),
        ("target_parameters", ["x"]),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", 1),
        ("init_lora_weights", 0),
        ("peft_type", "IA3"),
        ("task_type", "SEQ_CLS"),
        ("use_qalora", True),
        ("a_field_of_tomorrow", 3),
        ("a_field_of_tomorrow", 0),
        ("r", 0),
        ("r", 4.5),
        ("r", True),
        ("r", 1 << 16),
        ("lora_alpha", "8"),
        ("lora_alpha", True),
        ("lora_alpha", 1e300),
        ("lora_alpha", -1e300),
        ("rank_pattern", [1]),
        ("rank_pattern", {"q_proj": -1}),
        ("alpha_pattern", {"q_proj": "8"}),
        ("target_modules", None),
        ("target_modules", []),
        ("target_modules", {"q_proj": 1}),
        ("exclude_modules", ["k_proj", 1]),
        ("layers_to_transform", "0"),
        ("layers_to_transform", [True]),
        ("use_rslora", "yes"),
        ("ensure_weight_tying", 1),
    ],
)
def test_configuration_is_an_allow_list(good: Path, base: Base, field: str, value: object) -> None:
    refused("UnsupportedConfig", f"`{field}", lambda: checked(good, base, **{field: value}))


def test_layers_of_a_pattern_are_refused_as_by_peft(good: Path, base: Base) -> None:
    both = {"target_modules": ".*(q|down)_proj", "layers_to_transform": [0, 1]}
    refused("UnsupportedConfig", "`layers_to_transform` must be absent", lambda: checked(good, base, **both))


def test_unknown_fields_may_stand_at_their_default(good: Path, base: Base) -> None:
    checked(
        good, base, a_field_of_tomorrow=None, another=False, third={}, auto_mapping=None, peft_version="99"
    )


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{", b"[" * 100_000, b"\xff\xfe",
        b'{"peft_type": "LORA", "lora_alpha": NaN, "target_modules": "q_proj"}',
        b'{"peft_type": "IA3", "peft_type": "LORA", "target_modules": "q_proj"}',
    ],
)  # fmt: skip
def test_configuration_that_is_no_json(base: Base, good: Path, text: bytes) -> None:
    weights = (good / "adapter_model.safetensors").read_bytes()
    refused(
        "UnsupportedConfig",
        "`adapter_config.json`: the file must",
        lambda: checked_bytes(text, weights, base),
    )


def test_limits_of_the_pool(good: Path, base: Base) -> None:
    refused("RankTooLarge", "rank 4 must be at most 3", lambda: checked(good, base, LoraConfig(max_rank=3)))
    only_q = LoraConfig(target_modules=("q_proj",))
    refused("UnsupportedConfig", "target_modules", lambda: checked(good, base, only_q))
    small = Base(base.shape, base.page_elems, base.dtype, 0)
    refused("TooLarge", "pages", lambda: checked(good, small))
    head = {"target_modules": ["q_proj", "lm_head"]}
    refused(
        "UnsupportedConfig",
        "not lm_head",
        lambda: checked(good, base, LoraConfig(target_modules=PROJECTIONS), **head),
    )


def test_the_limits_of_the_pool_may_be_reached(tiny: world.TinyModel, good: Path, base: Base) -> None:
    assert checked(good, base, LoraConfig(max_rank=4)).rank == 4
    pages = checked(good, base).plan.pages
    for most in (pages, pages - 1):
        held = Base(base.shape, base.page_elems, base.dtype, most)
        if most == pages:
            checked(good, held)
        else:
            refused("TooLarge", f"needs {pages} pages", lambda held=held: checked(good, held))
    mixed = tiny.adapter("mixed", 51, **GOOD, rank_pattern={"down_proj": 6})
    assert checked(mixed, base, LoraConfig(max_rank=6)).rank == 6
    refused("RankTooLarge", "rank 6 must", lambda: checked(mixed, base, LoraConfig(max_rank=5)))


def test_tensors_must_match_the_configuration_and_the_base(good: Path, base: Base, tmp_path: Path) -> None:
    prefix = "base_model.model.model.layers.0."
    q = prefix + "self_attn.q_proj"
    whole = base.weight(q.removeprefix("base_model.model."))
    assert whole is not None
    cases: dict[str, tuple[str, str, Any]] = {
        "nan": ("InvalidTensors", "finite", lambda t: t[f"{q}.lora_A.weight"].fill_(float("nan"))),
        "inf": ("InvalidTensors", "finite", lambda t: t[f"{q}.lora_B.weight"].fill_(float("inf"))),
        "half": ("InvalidTensors", "lora_A and lora_B", lambda t: t.pop(f"{q}.lora_B.weight")),
        "untargeted": (
            "InvalidTensors", "target_modules",
            lambda t: t.update({prefix + "mlp.up_proj.lora_A.weight": torch.zeros(4, 64)}),
        ),
        "other-layer": (
            "BaseModelMismatch", "layers.7",
            lambda t: t.update({"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(4, 64)}),
        ),
        "no-prefix": (
            "InvalidTensors", "lora_A or lora_B", lambda t: t.update({"q_proj.weight": torch.zeros(2)}),
        ),
        "dora": (
            "InvalidTensors", "lora_A or lora_B",
            lambda t: t.update({f"{q}.lora_magnitude_vector": torch.zeros(64)}),
        ),
        "width": ("BaseModelMismatch", "shape", lambda t: t.update({f"{q}.lora_A.weight": torch.zeros(4, 128)})),
        "rank": ("InvalidTensors", "shape", lambda t: t.update({f"{q}.lora_A.weight": torch.zeros(5, 64)})),
        "height": ("BaseModelMismatch", "shape", lambda t: t.update({f"{q}.lora_B.weight": torch.zeros(63, 4)})),
        "rank-of-b": (
            "InvalidTensors", "shape",
            lambda t: t.update({f"{q}.lora_B.weight": torch.zeros(len(whole), 5)}),
        ),
        "named-as-an-embedding": (
            "InvalidTensors", "as PEFT does",
            lambda t: t.update({f"{q}.lora_embedding_A": t.pop(f"{q}.lora_A.weight")}),
        ),
        "whole-head": (
            "InvalidTensors", "whole vocabulary",
            lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(2, 64)}),
        ),
        "changed-base": (
            "BaseModelMismatch", "must equal", lambda t: t.update({f"{q}.base_layer.weight": torch.zeros_like(whole)}),
        ),
        "cut-base": (
            "BaseModelMismatch", "must have the shape", lambda t: t.update({f"{q}.base_layer.weight": torch.zeros(2)}),
        ),
        "integers": (
            "InvalidTensors", "dtype", lambda t: t.update({f"{q}.lora_A.weight": torch.zeros(4, 64).int()}),
        ),
    }  # fmt: skip
    for name, (reason, text, edit) in cases.items():
        folder = edited(good, tmp_path / name, edit)
        refused(reason, text, lambda folder=folder: checked(folder, base))
    empty = edited(good, tmp_path / "empty", lambda t: t.clear())
    refused("BaseModelMismatch", "none matches", lambda: checked(empty, base, target_modules=["c_attn"]))


def test_overflow_in_the_models_dtype_is_refused(good: Path, base: Base, tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    folder = edited(good, tmp_path / "big", lambda t: t[name].fill_(1e6))
    checked(folder, base)
    half = Base(base.shape, base.page_elems, torch.float16, base.max_pages)
    refused("InvalidTensors", "finite", lambda: checked(folder, half))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, 2 * PIECE])
def test_a_value_that_is_no_number_is_found_wherever_it_stands(value: float, at: int) -> None:
    tensor = torch.zeros(2 * PIECE + 1)
    assert is_finite(tensor, torch.float32)
    tensor[at] = value
    assert not is_finite(tensor, torch.float32)


def tensor_file(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (b"", "cut short"),
        (b"\x80\x04\x95", "cut short"),  # a pickle
        (struct.pack("<Q", 1 << 62) + b"{}", "header must fit"),
        (tensor_file(b"{"), "JSON"),
        (tensor_file(b"[" * 200_000), "JSON"),
        (tensor_file(b"[]"), "JSON object"),
        (tensor_file(b'{"__metadata__":[]}'), "`__metadata__`"),
        (tensor_file(b" " * (2 << 20) + b"{}"), "header must fit"),
        (tensor_file(f'{{"{"a" * 600}":{ENTRY}}}'.encode(), b"0000"), "at most 512 characters"),
        (tensor_file(f'{{"a":{ENTRY},"a":{ENTRY}}}'.encode(), b"0000"), "JSON"),
        (tensor_file(f'{{"a":{ENTRY}}}'.encode(), b"00000000"), "data must end"),
        (tensor_file(f'{{"a":{ENTRY}}}'.encode(), b"00"), "data must end"),
        (tensor_file(f'{{"a":{ENTRY},"b":{ENTRY}}}'.encode(), b"0000"), "begin where"),
        (tensor_file(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', b"00000000"), "begin where"),
        (
            tensor_file(b'{"a":{"dtype":"F32","shape":[1,1,1,1,1],"data_offsets":[0,4]}}', b"0000"),
            "at most 4 sizes",
        ),
        (tensor_file(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}}', b"0000"), "two ascending"),
        (tensor_file(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', b"0000"), "shape"),
        (
            tensor_file(
                b'{"a":{"dtype":"F32","shape":[1000000000000,1000000],"data_offsets":[0,4]}}', b"0000"
            ),
            "bytes",
        ),
        (tensor_file(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', b"0000"), "ascending"),
        (
            tensor_file(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}', b"00000000"),
            "as many bytes",
        ),
        (tensor_file(b'{"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}', b"0000"), "dtype"),
        (tensor_file(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}}', b"0000"), "exactly"),
        (tensor_file(b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', b"0000"), "shape"),
    ],
)
def test_hostile_tensor_files(good: Path, base: Base, file: bytes, text: str) -> None:
    config = (good / "adapter_config.json").read_bytes()
    refused("InvalidTensors", text, lambda: checked_bytes(config, file, base))


@pytest.mark.parametrize(
    "blob", [b"", b"\0" * 15, struct.pack("<Q", 1 << 60) + b"x" * 20, b"\0" * 8 + b"\1" * 8]
)
def test_hostile_blobs(base: Base, blob: bytes) -> None:
    refused("Corrupt", None, lambda: check(memoryview(blob), base, LoraConfig()))


@pytest.mark.parametrize("length", [0, 7, 8, 100, 1000, 5000])
def test_a_file_cut_anywhere_is_refused(good: Path, base: Base, length: int) -> None:
    config = (good / "adapter_config.json").read_bytes()
    whole = (good / "adapter_model.safetensors").read_bytes()
    refused("InvalidTensors", None, lambda: checked_bytes(config, whole[:length], base))


@pytest.mark.parametrize(
    "pattern",
    [r"(.*)*\.(.*)*x", r"(a+)+$|((.*\.)*)*!", "(" * 500, "x" * 2000, r"(?P<n>a)(?P<n>b)", "a{100000000000}"],
)
def test_hostile_patterns_end_soon(pattern: str) -> None:
    modules = [
        f"model.layers.{i}.self_attn.{p}" for i in range(32) for p in ("q_proj", "k_proj", "v_proj", "o_proj")
    ]
    started = time.monotonic()
    for field in ("target_modules", "rank_pattern", "exclude_modules", "layers_pattern"):
        config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "layers_to_transform": [1]}
        config[field] = {pattern: 4} if field == "rank_pattern" else pattern
        with contextlib.suppress(AdapterError):  # a pattern that is slow or invalid is refused, no more
            resolve(parse(json.dumps(config).encode()), modules)
    assert time.monotonic() - started < 15


def test_store_names_nothing_by_what_came_from_outside(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "data")
    for name in ("../../etc/passwd", "sha256:../x", "sha256:" + "A" * 64, "sha256:" + "a" * 63, ""):
        with pytest.raises(ValueError, match="64 hex"):
            store.has(name)
    digest = "sha256:" + "a" * 64
    with pytest.raises(DigestMismatchError), store.receive(digest, 100) as incoming:
        incoming.write(b"other bytes")
        incoming.commit()
    with pytest.raises(TooLargeError), store.receive(digest, 4) as incoming:
        incoming.write(b"12345")
    assert not store.has(digest)
    assert not list((tmp_path / "data" / "incoming").iterdir())


def test_bytes_damaged_on_disk_are_never_served(
    tiny: world.TinyModel, good: Path, tmp_path: Path, engines: world.Engines
) -> None:
    client = engines.client(tiny.folder, adapters=[("a", good)])
    registry = client.engine.registry
    digest = world.reports(client.engine)["a"].digest
    [first] = client.wait(client.submit([1, 2, 3], "a"))
    client.engine.call(lambda: client.engine.pool.drop(digest)).result()
    registry.store._path(digest).write_bytes(b"damaged")
    name = client.submit([1, 2, 3], "a")
    client.wait(name)
    assert client.finish[name] == "error"
    report = world.reports(client.engine)["a"]
    assert (report.state, report.reason) == ("Missing", "Corrupt")
    assert client.engine.call(lambda: registry.wants(digest)).result()
    assert client.engine.pool.counts().free == client.engine.pool.total
    with pytest.raises(RequestError, match="does not exist"):
        client.submit([1, 2, 3], "a")
    world.put_blob(client.engine, good)  # whoever fetches sees it Missing and sends the bytes again
    client.engine.call(lambda: registry.blob_stored(digest, lambda: None)).result()
    world.wait_for(lambda: world.reports(client.engine)["a"].state == "Registered")
    assert client.wait(client.submit([1, 2, 3], "a")) == [first]
    assert (world.reports(client.engine)["a"].state, world.reports(client.engine)["a"].reason) == (
        "Resident",
        "",
    )


def test_states_from_missing_to_gone(tiny: world.TinyModel, good: Path, engines: world.Engines) -> None:
    client = engines.client(tiny.folder)
    engine, digest = client.engine, world.folder_digest(good)

    def declare(*names: str, until: float = 1e18) -> None:
        wanted = [Declaration(name, digest) for name in names]
        engine.call(lambda: engine.registry.declare((1, 1), wanted, until)).result()

    declare("a")
    assert world.reports(engine)["a"].state == "Missing"
    with pytest.raises(RequestError):
        client.submit([1], "a")
    world.put_blob(engine, good)
    engine.call(lambda: engine.registry.blob_stored(digest, lambda: None)).result()
    world.wait_for(lambda: world.reports(engine)["a"].state == "Registered")
    client.wait(client.submit([1, 2], "a"))
    assert world.reports(engine)["a"].state == "Resident"
    long = client.submit([1, 2], "a", count=200)
    client.wait_tokens(long, 1)
    declare(until=1e18)
    assert world.reports(engine)["a"].state == "Draining"
    with pytest.raises(RequestError):
        client.submit([1], "a")
    client.wait(long)
    assert client.finish[long] == "length"
    world.wait_for(lambda: not world.reports(engine))
    assert not engine.registry.store.has(digest)
    assert engine.pool.counts().free == engine.pool.total


def test_draining_ends_in_an_abort_when_its_time_is_over(
    tiny: world.TinyModel, good: Path, engines: world.Engines
) -> None:
    client = engines.client(tiny.folder, adapters=[("a", good)])
    engine = client.engine
    long, other = client.submit([1, 2], "a", count=400), client.submit([1, 2], count=30)
    client.wait_tokens(long, 1)
    engine.call(lambda: engine.registry.declare((0, 0), [], time.monotonic() - 1)).result()
    client.wait(long, other)
    assert client.finish == {long: "unloaded", other: "length"}
    world.wait_for(lambda: engine.pool.counts().free == engine.pool.total)
    assert engine.registry.evictions == 1


def test_pinned_adapters_are_loaded_ahead_and_stay(
    tiny: world.TinyModel, good: Path, engines: world.Engines
) -> None:
    client = engines.client(tiny.folder)
    engine, digest = client.engine, world.put_blob(client.engine, good)
    pinned = [Declaration("a", digest, pinned=True)]
    engine.call(lambda: engine.registry.declare((0, 0), pinned, 0)).result()
    world.wait_for(lambda: world.reports(engine)["a"].state == "Resident")
    world.wait_for(lambda: engine.pool.pinned_pages() > 0)
    client.settle()
    assert engine.pool.counts().cached == 0
    engine.call(lambda: engine.registry.declare((0, 0), [], 0)).result()
    world.wait_for(lambda: engine.pool.counts().free == engine.pool.total)


def test_hundreds_of_loads_leave_nothing(tiny: world.TinyModel, good: Path, engines: world.Engines) -> None:
    client = engines.client(tiny.folder, adapters=[("a", good)])
    engine = client.engine
    digest = world.reports(engine)["a"].digest
    [first] = client.wait(client.submit([1, 2, 3], "a", count=2))
    for _ in range(300):
        engine.call(lambda: engine.pool.drop(digest)).result()
        [again] = client.wait(client.submit([1, 2, 3], "a", count=2))
        assert again == first
    assert engine.registry.evictions == 300
    engine.call(engine.pool.check).result()


def test_folder_blob_needs_both_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(folder_blob(tmp_path))


def test_no_lora_takes_none(tiny: world.TinyModel, good: Path, engines: world.Engines) -> None:
    replica = engines.replica(tiny.folder, lora=None)
    assert isinstance(replica.engine.config, EngineConfig)
    with pytest.raises(RequestError, match="at most 0"):
        world.declare(replica.engine, [("a", good)])
