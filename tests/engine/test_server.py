"""The serving port over real HTTP: OpenAI's client, errors, streams, clients that go, identities."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_world as world
import httpx
import openai
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from server_world import Served
from tenantry.api.identity import Signer
from tenantry_engine.digest import folder_digest
from tenantry_engine.identity import FETCHER, GATEWAY, OPERATOR, Verifier

SALT = "0" * 64


@pytest.fixture(scope="module")
def open_server(tiny: world.TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A replica that serves everybody, with two adapters."""
    served = Served(tiny.folder, tmp_path_factory.mktemp("open"), None)
    world.declare(
        served.engine,
        [
            ("one", tiny.adapter("one", 61, r=8, target_modules="all-linear")),
            ("two", tiny.adapter("two", 62, r=3, target_modules=["q_proj", "o_proj"])),
        ],
    )
    yield served
    world.wait_for(served.idle)
    served.close()


@pytest.fixture
def client(open_server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=open_server.url + "/v1", api_key="none", max_retries=0)


USER = [{"role": "user", "content": "the quick brown fox"}]


def post(served: Served, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    if path == "/v1/chat/completions":
        body = {"model": "base", "messages": USER, "max_tokens": 4, **body}
    return served.http.post(path, json=body)


def test_the_openai_client(client: openai.OpenAI) -> None:
    assert {m.id for m in client.models.list()} == {"base", "one", "two"}
    texts = {}
    for model in ("base", "one", "two"):
        raw = client.chat.completions.with_raw_response.create(
            model=model, messages=USER, temperature=0, max_tokens=12, extra_body={"ignore_eos": True}
        )
        assert raw.headers["x-tenantry-served"] == model
        answer = raw.parse()
        assert answer.usage.completion_tokens == 12
        assert answer.choices[0].finish_reason == "length"
        texts[model] = answer.choices[0].message.content
        stream = client.chat.completions.create(
            model=model, messages=USER, temperature=0, max_tokens=12, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == texts[model]
        assert chunks[-1].usage.completion_tokens == 12
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[0].choices[0].delta.role == "assistant"
    assert len(set(texts.values())) == 3
    plain = client.completions.create(model="base", prompt="the quick", max_tokens=3, temperature=0)
    assert plain.usage.prompt_tokens > 0
    assert plain.object == "text_completion"


def test_the_answer_of_the_engine_is_that_of_transformers(open_server: Served, tiny: world.TinyModel) -> None:
    prompt = [5, 9, 33, 60, 61]
    answer = post(
        open_server,
        "/v1/completions",
        model="base",
        prompt=prompt,
        max_tokens=10,
        temperature=0,
        ignore_eos=True,
    ).json()
    want = world.greedy(tiny.reference(), prompt, 10)
    assert answer["choices"][0]["text"] == open_server.replica.serving._tokenizer.decode(want)


def test_seeds_choices_and_prompts(open_server: Served) -> None:
    asked = {"temperature": 1.3, "seed": 7, "max_tokens": 16, "ignore_eos": True}
    first, second = (post(open_server, n=3, **asked).json() for _ in range(2))
    texts = [c["message"]["content"] for c in first["choices"]]
    assert texts == [c["message"]["content"] for c in second["choices"]]
    assert len(set(texts)) == 3
    assert first["usage"]["completion_tokens"] == 48
    [alone] = post(open_server, **asked).json()["choices"]
    assert alone["message"]["content"] == texts[0], "neighbours must not change a draw"
    many = post(open_server, "/v1/completions", model="base", prompt=["the", "fox"], n=2, max_tokens=2).json()
    assert [c["index"] for c in many["choices"]] == [0, 1, 2, 3]


def test_stop_strings_and_token_ids(open_server: Served) -> None:
    whole = post(open_server, temperature=0, max_tokens=20, ignore_eos=True).json()
    text = whole["choices"][0]["message"]["content"]
    stop = text[5:8]
    answer = post(open_server, temperature=0, max_tokens=20, ignore_eos=True, stop=stop).json()
    assert answer["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 20
    lines = post(open_server, temperature=0, max_tokens=20, ignore_eos=True, stop=[stop], stream=True).text
    events = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == text[: text.index(stop)]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_logit_bias_decides(open_server: Served) -> None:
    [token] = open_server.replica.serving._tokenizer.encode("the")
    answer = post(
        open_server, max_tokens=5, ignore_eos=True, temperature=0, logit_bias={str(token): 100}
    ).json()
    assert answer["choices"][0]["message"]["content"] == "the" * 5


def test_min_tokens_and_penalties(open_server: Served) -> None:
    every = list(range(open_server.replica.serving._tokenizer.vocab_size))
    short = post(open_server, temperature=0, max_tokens=9, stop_token_ids=every[10:74]).json()
    long = post(open_server, temperature=0, max_tokens=9, min_tokens=7, stop_token_ids=every[10:74]).json()
    assert long["usage"]["completion_tokens"] >= 7 > 0 < short["usage"]["completion_tokens"]
    text = post(
        open_server, temperature=0, max_tokens=30, ignore_eos=True, frequency_penalty=2, presence_penalty=2
    ).json()
    assert text["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"model": 5}, 400, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user<|im_end|>", "content": "x"}]}, 400, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content[0].type",
        ),
        ({"temperature": 3}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 100000}, 400, "messages"),
        ({"n": 1000}, 400, "n"),
        ({"seed": 1 << 70}, 400, "seed"),
        ({"stop": [""]}, 400, "stop[0]"),
        ({"stop": ["x"] * 17}, 400, "stop"),
        ({"logit_bias": {"99999999": 1}}, 400, "logit_bias"),
        ({"stop_token_ids": [99999999]}, 400, "stop_token_ids"),
        ({"min_tokens": 5}, 400, "min_tokens"),
        ({"logprobs": 3}, 400, "logprobs"),
        ({"tools": [{}]}, 400, "tools[0].type"),
        ({"cache_salt": "x"}, 400, "cache_salt"),
        ({"chat_template": "x"}, 400, "chat_template"),
    ],
)
def test_bad_requests_name_the_field(
    open_server: Served, change: dict[str, Any], status: int, param: str
) -> None:
    answer = post(open_server, **change)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    if status == 404:
        assert error["code"] == "model_not_found"
    if change.get("max_tokens") == 100000:
        assert "512" in error["message"]
        assert "100000" in error["message"]


def test_bodies_that_are_no_requests(open_server: Served) -> None:
    for body in (b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000):
        answer = open_server.http.post("/v1/chat/completions", content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_json"
    big = open_server.http.post("/v1/chat/completions", content=b"x" * ((8 << 20) + 1))
    assert big.status_code == 413
    assert post(open_server, user=None, seed=None).status_code == 200, "null means absent"


def test_tokenize(open_server: Served) -> None:
    by_text = post(open_server, "/tokenize", model="base", prompt="the quick").json()
    assert by_text["count"] == len(by_text["tokens"]) > 0
    assert by_text["max_model_len"] == 512
    by_chat = post(open_server, "/tokenize", model="base", messages=USER).json()
    assert by_chat["tokens"] == open_server.replica.serving._tokenizer.encode_chat(USER)
    assert post(open_server, "/tokenize", model="base").status_code == 400


def test_a_client_that_goes_frees_its_pages_in_every_phase(open_server: Served) -> None:
    """Waiting, computing its prompt, before and after the first token, streaming or not."""
    draw = random.Random(0)
    body = {"model": "one", "messages": USER, "max_tokens": 300, "ignore_eos": True}
    long = {"model": "two", "prompt": "the quick brown fox " * 60, "max_tokens": 30, "ignore_eos": True}

    async def leave(client: httpx.AsyncClient, number: int) -> None:
        path, request = ("/v1/completions", long) if number % 3 == 0 else ("/v1/chat/completions", body)
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(draw.uniform(0.001, 0.25)),
                client.stream("POST", path, json={**request, "stream": number % 2 == 0}) as answer,
            ):
                async for _ in answer.aiter_bytes():
                    pass

    async def run() -> None:
        async with httpx.AsyncClient(
            base_url=open_server.url, limits=httpx.Limits(max_connections=100)
        ) as client:
            await asyncio.gather(*(leave(client, number) for number in range(40)))

    asyncio.run(run())
    world.wait_for(open_server.idle)
    open_server.engine.call(open_server.engine.pool.check).result()
    assert post(open_server).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_stops_costing_steps(tiny: world.TinyModel, tmp_path: Path, stream: bool) -> None:
    served = Served(tiny.folder, tmp_path / "d", None)
    permits = threading.Semaphore(0)
    runner = served.engine._runner
    real = runner.run

    def step(*arguments: Any) -> Any:
        assert permits.acquire(timeout=30)
        return real(*arguments)

    async def leave() -> None:
        body = {"model": "base", "messages": USER, "max_tokens": 400, "ignore_eos": True, "stream": stream}
        async with httpx.AsyncClient(base_url=served.url) as client:
            task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await asyncio.to_thread(world.wait_for, lambda: served.engine.scheduler.running)
            permits.release(3)
            await asyncio.sleep(0.05)
            task.cancel()

    try:
        runner.run = step  # type: ignore[method-assign]
        asyncio.run(leave())
        world.wait_for(lambda: served.replica.serving.in_flight == 0)
        used = 0
        while served.engine.scheduler.running and used < 10:
            permits.release()
            used += 1
            served.engine.call(lambda: None).result(timeout=60)
        assert used < 10, "a request that nobody waits for ran on"
    finally:
        permits.release(1000)
        served.close()


def test_overload_is_503_with_retry_after(tiny: world.TinyModel, tmp_path: Path) -> None:
    served = Served(tiny.folder, tmp_path / "d", None, slots=1, max_waiting=1)
    try:
        hold = served.engine.call(lambda: release.wait(30))  # the engine's thread is busy: both queue up
        release = threading.Event()
        answers: list[int] = []
        threads = [
            threading.Thread(
                target=lambda: answers.append(post(served, max_tokens=100, ignore_eos=True).status_code)
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        world.wait_for(lambda: len(served.engine._inbox) >= 4)
        release.set()
        hold.result()
        for thread in threads:
            thread.join()
        assert sorted(answers) == [200, 503, 503, 503]
        answer = post(served)
        assert answer.status_code == 200
    finally:
        served.close()


# identities


class Signed:
    """A replica that asks for identities, and the signers it trusts."""

    def __init__(self, model: Path, folder: Path) -> None:
        keys = {issuer: Ed25519PrivateKey.generate() for issuer in (GATEWAY, OPERATOR, FETCHER)}
        self.signers = {issuer: world.certify(folder / "ids", issuer, key) for issuer, key in keys.items()}
        self.served = Served(model, folder / "data", Verifier("pool-uid", folder / "ids"))
        self.fence = 0

    def token(self, issuer: str, path: str, body: bytes = b"", **claims: Any) -> str:
        return self.signers[issuer].sign("pool-uid", path, body, **claims)

    def ask(
        self, model: str, digest: str = "", uid: str = "u-1", *, claims: Any = None, **body: Any
    ) -> httpx.Response:
        path = "/v1/chat/completions"
        raw = json.dumps({"model": model, "messages": USER, "max_tokens": 2, **body}).encode()
        identity = {
            "tenant": "acme", "uid": uid, "weight": 1, "cap": 4, "lane": "fast", "salt": SALT, "model": model,
            "digest": digest, **(claims or {}),
        }  # fmt: skip
        headers = {"x-tenantry-identity": self.token(GATEWAY, path, raw, **identity)}
        return self.served.http.post(path, content=raw, headers=headers)

    def admin(
        self, method: str, path: str, issuer: str, body: bytes = b"", *, sign: str | None = None
    ) -> httpx.Response:
        signer: Signer = self.signers[issuer]
        token = signer.sign_hash("pool-uid", path, sign) if sign else signer.sign("pool-uid", path, body)
        return self.served.admin.request(
            method, path, content=body, headers={"authorization": f"Bearer {token}"}
        )

    def declare(
        self, *adapters: dict[str, Any], fence: tuple[int, int] | None = None, drain: float = 60
    ) -> httpx.Response:
        self.fence += 1
        epoch, counter = fence or (1, self.fence)
        body = {
            "fence": {"epoch": epoch, "counter": counter},
            "drainSeconds": drain,
            "adapters": list(adapters),
        }
        return self.admin("PUT", "/admin/v1/adapters", OPERATOR, json.dumps(body).encode())

    def push(self, folder: Path, digest: str | None = None) -> httpx.Response:
        digest = digest or folder_digest(folder)
        body = b"".join(world.folder_blob(folder))
        return self.admin(
            "PUT", f"/admin/v1/blobs/{digest}", FETCHER, body, sign=digest.removeprefix("sha256:")
        )


@pytest.fixture
def signed(tiny: world.TinyModel, tmp_path: Path) -> Iterator[Signed]:
    made = Signed(tiny.folder, tmp_path)
    yield made
    made.served.close()


def test_only_signed_identities_are_served(signed: Signed) -> None:
    http = signed.served.http
    body = json.dumps({"model": "base", "messages": USER, "max_tokens": 2}).encode()
    assert http.post("/v1/chat/completions", content=body).status_code == 401
    answer = signed.ask("base")
    assert answer.status_code == 200
    assert answer.headers["x-tenantry-served"] == "base"
    used = answer.request.headers["x-tenantry-identity"]
    replayed = http.post(
        "/v1/chat/completions", content=answer.request.content, headers={"x-tenantry-identity": used}
    )
    assert replayed.status_code == 401
    assert signed.ask("base", claims={"model": "other"}).status_code == 401
    assert signed.ask("base", claims={"weight": 0}).status_code == 401
    assert http.get("/v1/models").json()["data"][0]["id"] == "base"
    for path in ("/tokenize", "/v1/completions"):
        assert http.post(path, content=body).status_code == 401
    operator = signed.token(OPERATOR, "/v1/chat/completions", body)
    assert (
        http.post("/v1/chat/completions", content=body, headers={"x-tenantry-identity": operator}).status_code
        == 401
    )


def test_admin_routes_ask_for_the_right_caller(signed: Signed) -> None:
    admin = signed.served.admin
    for method, path in (("GET", "/admin/v1/adapters"), ("PUT", "/admin/v1/adapters"), ("GET", "/admin/v1/load"),
                         ("POST", "/admin/v1/drain"), ("PUT", "/admin/v1/blobs/sha256:" + "0" * 64)):  # fmt: skip
        assert admin.request(method, path).status_code == 401
    assert signed.admin("GET", "/admin/v1/adapters", GATEWAY).status_code == 401
    assert signed.admin("GET", "/admin/v1/load", OPERATOR).status_code == 401
    assert signed.admin("GET", "/admin/v1/load", GATEWAY).status_code == 200
    assert signed.admin("POST", "/admin/v1/drain", GATEWAY).status_code == 401
    assert admin.get("/healthz").status_code == 200
    assert admin.get("/readyz").status_code == 200
    assert "vllm:num_requests_running" in admin.get("/metrics").text


def test_an_adapters_life_over_the_admin_port(signed: Signed, tiny: world.TinyModel) -> None:
    folder = tiny.adapter("one", 61, r=8, target_modules="all-linear")
    digest = folder_digest(folder)
    one = {"name": "acme-ml.tone--1.0.0-abc", "digest": digest, "tenant": "u-1"}
    assert signed.push(folder).json()["error"]["code"] == "not_wanted"
    report = signed.declare(one).json()
    assert report["adapters"][0]["state"] == "Missing"
    assert report["capacity"]["maxRank"] == 32
    assert (
        sum(report["capacity"]["pages"][s] for s in ("free", "kv", "adapter", "cached"))
        == report["capacity"]["pages"]["total"]
    )
    assert signed.ask(one["name"], digest).status_code == 404
    wrong = signed.admin(
        "PUT", f"/admin/v1/blobs/{digest}", FETCHER, b"other", sign=digest.removeprefix("sha256:")
    )
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "digest_mismatch")
    assert signed.push(folder).status_code == 201
    assert signed.push(folder).status_code == 200
    report = signed.admin("GET", "/admin/v1/adapters", OPERATOR).json()
    assert (report["adapters"][0]["state"], report["adapters"][0]["rank"]) == ("Registered", 8)
    answer = signed.ask(one["name"], digest)
    assert answer.status_code == 200
    assert answer.headers["x-tenantry-served"] == one["name"]
    # exactly that name, with exactly that digest, for exactly that tenant; never the base model instead
    for name, other, uid in (
        (one["name"], "sha256:" + "0" * 64, "u-1"),
        (one["name"], "", "u-1"),
        (one["name"], digest, "u-2"),
        ("base", digest, "u-1"),
        ("acme-ml.other", digest, "u-1"),
    ):
        refused = signed.ask(name, other, uid)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found"), (
            name,
            other,
            uid,
        )
    load = signed.admin("GET", "/admin/v1/load", GATEWAY).json()
    assert load["registered"] == load["resident"] == [one["name"]]
    again = signed.declare(one).json()
    assert again["adapters"][0]["state"] == "Resident"
    taken = signed.declare({**one, "digest": "sha256:" + "1" * 64})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")
    fenced = signed.declare(fence=(0, 99))
    assert (fenced.status_code, fenced.json()["error"]["code"]) == (409, "fenced")
    assert signed.declare({**one, "name": "../../x"}).status_code == 400
    assert signed.declare({**one, "name": "base"}).status_code == 400
    assert signed.declare(one, one).status_code == 400
    assert signed.declare({**one, "digest": "sha256:../../etc"}).status_code == 400
    assert signed.declare().json()["adapters"] == []
    pages = signed.admin("GET", "/admin/v1/adapters", OPERATOR).json()["capacity"]["pages"]
    assert pages["free"] == pages["total"]
    assert signed.ask(one["name"], digest).status_code == 404


def test_a_smoke_request_runs_an_adapter_for_the_operator_alone(
    signed: Signed, tiny: world.TinyModel
) -> None:
    folder = tiny.adapter("one", 61, r=8, target_modules="all-linear")
    one = {"name": "acme-ml.tone--1.0.0-abc", "digest": folder_digest(folder), "tenant": "u-1"}

    def smoke(issuer: str = OPERATOR, **changes: str) -> tuple[int, Any]:
        answer = signed.admin("POST", "/admin/v1/smoke", issuer, json.dumps({**one, **changes}).encode())
        return answer.status_code, answer.json()

    signed.declare(one)
    assert smoke()[0] == 404, "its bytes are not here yet"
    assert signed.push(folder).status_code == 201
    assert smoke() == (200, {"tokens": 2})
    assert smoke(GATEWAY)[0] == 401
    for changes in ({"digest": "sha256:" + "0" * 64}, {"tenant": "u-2"}, {"name": "acme-ml.other"}):
        assert smoke(**changes)[0] == 404
    assert smoke(name="")[0] == 400
    world.wait_for(signed.served.idle)
    assert signed.ask(one["name"], one["digest"]).status_code == 200


def test_weights_that_are_no_numbers_fail_the_smoke_request(signed: Signed, tiny: world.TinyModel) -> None:
    folder = tiny.adapter("nan", 62, r=8, target_modules="all-linear")
    poison(folder)
    one = {"name": "acme-ml.nan--1.0.0-abc", "digest": folder_digest(folder), "tenant": "u-1"}
    signed.declare(one)
    assert signed.push(folder).status_code == 201
    answer = signed.admin("POST", "/admin/v1/smoke", OPERATOR, json.dumps(one).encode())
    assert (answer.status_code, answer.json()["error"]["code"]) in (
        (422, "smoke_failed"),
        (404, "model_not_found"),
    )


def poison(folder: Path) -> None:
    """Make every weight NaN."""
    from safetensors.torch import load_file, save_file

    path = folder / "adapter_model.safetensors"
    save_file({name: tensor * float("nan") for name, tensor in load_file(path).items()}, path)


def test_an_adapter_that_does_not_fit_fails_with_its_reason(
    signed: Signed, tiny: world.TinyModel, tmp_path: Path
) -> None:
    big = tiny.adapter("big", 70, r=33, target_modules=["q_proj"])
    other = world.TinyModel.make(tmp_path, hidden_size=32).adapter("foreign", 71)
    names = {"rank": big, "foreign": other}
    signed.declare(*({"name": n, "digest": folder_digest(f), "tenant": "u-1"} for n, f in names.items()))
    for folder in names.values():
        assert signed.push(folder).status_code == 201
    report = {a["name"]: a for a in signed.admin("GET", "/admin/v1/adapters", OPERATOR).json()["adapters"]}
    assert (report["rank"]["state"], report["rank"]["reason"]) == ("Failed", "RankTooLarge")
    assert "33" in report["rank"]["message"]
    assert "32" in report["rank"]["message"]
    assert (report["foreign"]["state"], report["foreign"]["reason"]) == ("Failed", "BaseModelMismatch")
    assert signed.ask("rank", folder_digest(big)).status_code == 404
    assert signed.ask("base", "").status_code == 200


def test_a_withdrawn_adapter_ends_its_requests_with_an_error(signed: Signed, tiny: world.TinyModel) -> None:
    folder = tiny.adapter("one", 61, r=8, target_modules="all-linear")
    digest = folder_digest(folder)
    signed.declare({"name": "a", "digest": digest, "tenant": "u-1"})
    signed.push(folder)
    path = "/v1/chat/completions"
    raw = json.dumps(
        {"model": "a", "messages": USER, "max_tokens": 450, "ignore_eos": True, "stream": True}
    ).encode()
    claims = {
        "tenant": "t",
        "uid": "u-1",
        "weight": 1,
        "cap": 1,
        "lane": "fast",
        "salt": SALT,
        "model": "a",
        "digest": digest,
    }
    headers = {"x-tenantry-identity": signed.token(GATEWAY, path, raw, **claims)}
    with signed.served.http.stream("POST", path, content=raw, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        signed.declare(drain=0)
        rest = [line for line in lines if line.startswith("data: ")]
    assert "[DONE]" not in rest[-1], "an answer that was cut never ends cleanly"
    assert json.loads(rest[-1][6:])["error"]["code"] == "adapter_withdrawn"


def test_drain(signed: Signed) -> None:
    assert signed.admin("POST", "/admin/v1/drain", OPERATOR).json()["draining"] is True
    assert signed.served.admin.get("/readyz").status_code == 503
    refused = signed.ask("base")
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert signed.served.admin.get("/healthz").status_code == 200


def test_health_fails_when_no_step_ends(tiny: world.TinyModel, tmp_path: Path) -> None:
    served = Served(tiny.folder, tmp_path / "d", None, stall_seconds=0.2)
    release = threading.Event()
    try:
        runner = served.engine._runner
        real = runner.run

        def hang(*arguments: Any) -> Any:
            release.wait(30)
            return real(*arguments)

        runner.run = hang  # type: ignore[method-assign]
        thread = threading.Thread(target=lambda: post(served))
        thread.start()
        world.wait_for(lambda: served.admin.get("/healthz").status_code == 503)
        release.set()
        thread.join()
        world.wait_for(lambda: served.admin.get("/healthz").status_code == 200)
    finally:
        release.set()
        served.close()


def test_a_step_that_fails_ends_its_requests_and_no_more(tiny: world.TinyModel, tmp_path: Path) -> None:
    served = Served(tiny.folder, tmp_path / "d", None)
    try:
        runner = served.engine._runner
        real = runner.run

        def fail(*arguments: Any) -> Any:
            runner.run = real  # type: ignore[method-assign]
            raise RuntimeError("out of memory")

        runner.run = fail  # type: ignore[method-assign]
        assert post(served).status_code == 503
        assert post(served).status_code == 200
        assert served.idle()
    finally:
        served.close()
