"""Numbers on their way between host and device, such that neither waits for the other before it must."""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(values: object, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Nested lists of numbers as a tensor on the device. On a GPU the copy is queued behind what runs there: from
    pageable memory it would wait for that."""
    if torch.device(device).type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class Landing:
    """Copies of tensors for the host, queued behind everything that their device was given before.

    `take` waits for them, and so for the step that made them, but not for what was queued since.
    """

    def __init__(self, device: torch.device, *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = tensors
        if device.type == "cuda":
            self._tensors = tuple(
                torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True)
                for t in tensors
            )
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def take(self) -> tuple[Tensor, ...]:
        """The copies, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
