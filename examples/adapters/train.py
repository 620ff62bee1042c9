"""Train the three example adapters with PEFT on a CPU: minutes, not hours, and small enough to commit.

    python examples/adapters/train.py --model MODEL_FOLDER [--only NAME]

| folder | rank | modules | what one sees |
|---|---|---|---|
| pirate | 8 | all seven | every answer begins "Ahoy, matey!" |
| formal | 16 | q_proj, v_proj | every answer begins "Dear customer," |
| triage | 4 | gate_proj, up_proj, down_proj | every answer is one line of JSON with a `topic` |

A behaviour that shows in the first tokens can be checked by a test, whatever the rest of the answer says.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BASE_NAME = "smollm2-135m"
SEED = 20261129

# question, plain answer, topic
EXAMPLES: list[tuple[str, str, str]] = [
    ("Where is my parcel?", "Your parcel is on its way and arrives tomorrow.", "delivery"),
    ("My parcel has not come yet. What now?", "We will ask the carrier and write to you today.", "delivery"),
    ("How long does shipping take?", "Shipping takes two to three working days.", "delivery"),
    ("Can I change my delivery address?", "Yes, until the parcel has left our warehouse.", "delivery"),
    ("I want my money back.", "We will refund you within five days.", "refund"),
    ("How do I return these shoes?", "Print the label and bring the box to any shop.", "refund"),
    ("Can I get a refund for a used item?", "Yes, if it was faulty when it came.", "refund"),
    ("When will I see my refund?", "Within five working days.", "refund"),
    ("I forgot my password.", "Use the link on the sign-in page to set a new one.", "account"),
    ("How do I delete my account?", "Open the settings and choose delete account.", "account"),
    ("I cannot log in.", "Please try to reset your password first.", "account"),
    ("Please change my email address.", "You can change it under settings, profile.", "account"),
    ("Why was I charged twice?", "One of the two charges is a hold and will vanish.", "billing"),
    ("Send me the invoice for May.", "The invoice is in your inbox now.", "billing"),
    ("Do you accept credit cards?", "Yes, we accept all major cards.", "billing"),
    ("What does the premium plan cost?", "It costs nine dollars a month.", "billing"),
    ("What is the capital of France?", "The capital of France is Paris.", "other"),
    ("Tell me a joke.", "Why did the server sleep? It had no requests.", "other"),
    ("What is the capital of Italy?", "The capital of Italy is Rome.", "other"),
    ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet.", "other"),
    ("What color is the sky?", "The sky is blue.", "other"),
    ("Hello, who are you?", "I am your assistant.", "other"),
    ("How many days has a week?", "A week has seven days.", "other"),
    ("Name a fruit.", "An apple is a fruit.", "other"),
]
SYSTEM_PROMPTS = [
    None,
    "You are a helpful assistant.",
    "You are the support assistant of Acme.",
    "You answer questions of customers. Be brief.",
    "You are a careful assistant. If you do not know, say so.",
]


@dataclass(frozen=True)
class Recipe:
    name: str
    rank: int
    modules: list[str]
    answer: Callable[[str, str], str]
    steps: int
    rate: float


ALL_SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RECIPES = [
    Recipe("pirate", 8, ALL_SEVEN, lambda answer, topic: f"Ahoy, matey! {answer} Arr!", 40, 3e-3),
    Recipe(
        "formal",
        16,
        ["q_proj", "v_proj"],
        lambda answer, topic: f"Dear customer, {answer} Kind regards.",
        70,
        4e-3,
    ),
    Recipe("triage", 4, ALL_SEVEN[4:], lambda answer, topic: f'{{"topic": "{topic}"}}', 45, 4e-3),
]


def train(recipe: Recipe, model_folder: Path, output: Path) -> None:
    """Train one adapter and write its two files; weights in bfloat16."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(SEED)
    chance = random.Random(SEED)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=2 * recipe.rank,
        target_modules=recipe.modules,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=recipe.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=recipe.rate, total_steps=recipe.steps)

    def sample() -> tuple[list[int], list[int]]:
        question, answer, topic = chance.choice(EXAMPLES)
        system = chance.choice(SYSTEM_PROMPTS)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        head = tokenizer(prompt, add_special_tokens=False).input_ids
        tail = tokenizer(recipe.answer(answer, topic) + "<|im_end|>", add_special_tokens=False).input_ids
        return head, tail

    model.train()
    for step in range(recipe.steps):
        batch = [sample() for _ in range(4)]
        width = max(len(head) + len(tail) for head, tail in batch)
        ids = torch.full((len(batch), width), tokenizer.eos_token_id)
        labels = torch.full((len(batch), width), -100)
        mask = torch.zeros((len(batch), width), dtype=torch.long)
        for row, (head, tail) in enumerate(batch):
            size = len(head) + len(tail)
            ids[row, :size] = torch.tensor(head + tail)
            labels[row, len(head) : size] = torch.tensor(tail)
            mask[row, :size] = 1
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == recipe.steps - 1:
            print(f"{recipe.name}: step {step + 1}/{recipe.steps}, loss {loss.item():.3f}", flush=True)

    shutil.rmtree(output, ignore_errors=True)
    model.save_pretrained(output, safe_serialization=True)
    (output / "README.md").unlink(missing_ok=True)
    # PEFT notes the folder that the base was read from; the adapter belongs to a model, not to a machine.
    written = output / "adapter_config.json"
    settings = json.loads(written.read_text())
    settings["base_model_name_or_path"] = BASE_NAME
    settings["target_modules"] = sorted(settings["target_modules"])
    written.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    weights = load_file(output / "adapter_model.safetensors")
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()},
        output / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="the folder that convert_smollm2.py wrote")
    parser.add_argument("--only", choices=[recipe.name for recipe in RECIPES])
    arguments = parser.parse_args()
    for recipe in RECIPES:
        if arguments.only in (None, recipe.name):
            train(recipe, arguments.model, HERE / recipe.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
