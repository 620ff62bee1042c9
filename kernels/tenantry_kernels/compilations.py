"""Counts what Triton has compiled, so that a step that compiles (seconds, while all wait) is seen and not guessed."""

from __future__ import annotations

import sys

_PREFIX = "tenantry_kernels.triton_"


def compilations() -> dict[str, int]:
    """Variants that this process has compiled of each kernel, by name; empty where no kernel runs on a GPU.

    A kernel is compiled again for other dtypes, tile sizes and widths of the model: some per kernel while an engine
    warms up, none afterwards, since nothing that changes from step to step is specialised.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith(_PREFIX)]
    if not modules:
        return {}
    from triton.runtime.jit import JITFunction

    kernels = {
        f"{module.__name__.removeprefix(_PREFIX)}.{name}": kernel
        for module in modules
        for name, kernel in vars(module).items()
        if isinstance(kernel, JITFunction)
    }
    counts = {
        name: sum(len(cache[0]) for cache in kernel.device_caches.values())
        for name, kernel in kernels.items()
    }
    return {name: count for name, count in counts.items() if count}
