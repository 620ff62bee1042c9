"""The multi-LoRA engine: unified pages, continuous batching, an OpenAI surface."""
