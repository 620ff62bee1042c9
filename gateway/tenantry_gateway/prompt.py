"""The tenant's prompt: stands ahead of everything a client sends, whatever the client sends.

`refusal` and `vocabulary` are text for the model, not filters on what it answers. Special tokens in any text are plain
text: the engine tokenises messages with special tokens disabled.
"""

from __future__ import annotations

from typing import Any

from tenantry.api.tenant import Prompt


def render(prompt: Prompt) -> str:
    """One system text of all sections, empty where the tenant has none."""
    sections = []
    if prompt.system.strip():
        sections.append(prompt.system.strip())
    if prompt.refusal.strip():
        sections.append(f"What to refuse, and how:\n{prompt.refusal.strip()}")
    if prompt.vocabulary:
        words = "\n".join(f"- {word}" for word in prompt.vocabulary)
        sections.append(f"Use these terms exactly as written:\n{words}")
    return "\n\n".join(sections)


def compose(prompt: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tenant's text first; a client's `system` and `developer` messages follow, both as `system`.

    Chat templates of open models know no `developer` role.
    """
    client = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    return [{"role": "system", "content": prompt}, *client] if prompt else client
