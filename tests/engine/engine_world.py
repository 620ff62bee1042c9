"""What the engine's tests share: a tiny model, PEFT adapters for it, an engine to ask, and transformers to compare."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cluster import pki
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from tenantry.api.identity import Signer
from tenantry_engine.adapters.registry import Declaration
from tenantry_engine.config import EngineConfig, LoraConfig
from tenantry_engine.digest import folder_blob, folder_digest
from tenantry_engine.engine import Engine
from tenantry_engine.replica import Replica
from tenantry_engine.sequence import Sampling, Sequence
from tenantry_engine.work import Event
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass
class TinyModel:
    """A folder that an engine can load."""

    folder: Path
    adapters: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path, seed: int = 0, **overrides: Any) -> TinyModel:
        """Random weights, large enough that different inputs give different tokens."""
        torch.manual_seed(seed)
        make_tokenizer(folder)
        size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
        config = LlamaConfig(
            **{
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "vocab_size": size,
                "max_position_embeddings": 512,
                "initializer_range": 0.3,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "tie_word_embeddings": True,
                **overrides,
            }
        )
        LlamaForCausalLM(config).float().save_pretrained(folder)
        return cls(folder)

    def reference(self) -> Any:
        """The same model in transformers."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def adapter(self, name: str, seed: int, **config: Any) -> Path:
        """A PEFT folder with random weights in A and B."""
        if name not in self.adapters:
            self.adapters[name] = make_adapter(
                self.folder, self.folder.parent / f"{self.folder.name}-{name}", seed, **config
            )
        return self.adapters[name]


def certify(folder: Path, issuer: str, key: Ed25519PrivateKey) -> Signer:
    """A signer for the issuer; its certificate lies in the folder."""
    return Signer(issuer, pki.certify(folder, issuer, key))


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE with ChatML's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog and the cat sat on the mat"] * 4, trainer
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    )


def make_adapter(model: Path, folder: Path, seed: int, scale: float = 0.3, **config: Any) -> Path:
    """A PEFT adapter as `save_pretrained` writes it."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        **config,
    }
    wrapped = get_peft_model(base, PeftLoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=scale)
    wrapped.save_pretrained(folder)
    return folder


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """`count` tokens by transformers, whatever they are."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return out[0, len(prompt) :].tolist()


def with_adapter(model: Path, adapter: Path) -> Any:
    """transformers + PEFT."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter).eval()


class Client:
    """Asks an engine directly and collects what each sequence yields."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._events: queue.Queue[Event] = queue.Queue()
        self._count = 0
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        engine.listener = lambda events: [self._events.put(e) for e in events] and None

    def submit(
        self,
        prompt: list[int],
        served: str | None = None,
        *,
        count: int = 8,
        tenant: str = "t",
        **more: Any,
    ) -> str:
        """A greedy request by token ids; returns the sequence's id."""
        self._count += 1
        name = f"s{self._count}"
        sampling = more.pop("sampling", None) or Sampling(temperature=0, max_tokens=count)
        served = served or self.engine.config.model_name
        sequence = Sequence(name, tenant, list(prompt), sampling, served, **more)
        self.tokens[name] = []
        self.engine.call(lambda: self.engine.submit([sequence], None, None)).result(timeout=60)
        return name

    def wait(self, *names: str, timeout: float = 60) -> list[list[int]]:
        """Until these sequences ended; their tokens."""
        while not all(name in self.finish for name in names):
            self.take(self._events.get(timeout=timeout))
        return [self.tokens[name] for name in names]

    def wait_tokens(self, name: str, count: int, timeout: float = 60) -> None:
        """Until a sequence has yielded at least `count` tokens."""
        while len(self.tokens[name]) < count:
            self.take(self._events.get(timeout=timeout))

    def take(self, event: Event) -> None:
        name = event.sequence.id
        if event.token is not None:
            self.tokens[name].append(event.token)
        if event.finish is not None:
            assert name not in self.finish, "a sequence ended twice"
            self.finish[name] = event.finish

    def settle(self) -> None:
        """Everything posted so far has happened."""
        self.engine.call(lambda: None).result(timeout=60)


class Engines:
    """Makes replicas and closes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Replica] = []

    def replica(self, model: Path, *, adapters: Iterable[tuple[str, Path]] = (), **config: Any) -> Replica:
        """A running engine on its own data folder; adapters are declared for every tenant."""
        settings = {
            "model": model,
            "model_name": "base",
            "data_dir": self._folder / f"data-{len(self._made)}",
            "dtype": torch.float32,
            "step_tokens": 64,
            "lora": LoraConfig(max_rank=32),
            **config,
        }
        replica = Replica.load(EngineConfig(**settings), None)
        self._made.append(replica)
        replica.engine.start()
        if adapters:
            declare(replica.engine, adapters)
        return replica

    def client(self, model: Path, **config: Any) -> Client:
        return Client(self.replica(model, **config).engine)

    def close(self) -> None:
        for replica in self._made:
            engine = replica.engine
            engine.stop()
            replica.close()
            engine.pool.check()
            counts = engine.pool.counts()
            assert counts.kv == 0, "pages of a sequence were not given back"
            assert counts.adapter == engine.pool.pinned_pages(), "an adapter is still referred to"
            assert not engine.scheduler.in_flight


def put_blob(engine: Engine, folder: Path) -> str:
    """Stores an adapter's bytes; returns its digest."""
    digest = folder_digest(folder)
    store = engine.registry.store
    if not store.has(digest):
        with store.receive(digest, 1 << 30) as incoming:
            for piece in folder_blob(folder):
                incoming.write(piece)
            incoming.commit()
    return digest


def declare(engine: Engine, adapters: Iterable[tuple[str, Path]], tenant: str = "") -> None:
    """Declares PEFT folders, and waits until each is registered (or failed)."""
    wanted = [Declaration(name, put_blob(engine, folder), tenant) for name, folder in adapters]
    engine.call(lambda: engine.registry.declare(engine.registry.fence, wanted, 0.0)).result(timeout=60)
    wait_for(lambda: all(r.state != "Missing" for r in reports(engine).values()))


def reports(engine: Engine) -> dict[str, Any]:
    """The state of each served name."""
    found = engine.call(lambda: engine.registry.reports(engine.scheduler.in_flight)).result(timeout=60)
    return {report.name: report for report in found}


def wait_for(condition: Any, timeout: float = 60) -> None:
    """Until the condition holds; fails the test when it never does."""
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, "the condition never held"
        time.sleep(0.005)
