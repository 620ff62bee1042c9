"""The threads of the CPU path: right results from several callers at once, and with more threads than cores."""

from concurrent.futures import ThreadPoolExecutor

import torch
from tenantry_kernels import linear, pack_linear


def test_callers_at_once_and_more_threads_than_cores() -> None:
    torch.manual_seed(0)
    weight = pack_linear(torch.randn(640, 96))
    inputs = [torch.randn(rows, 96) for rows in (1, 7, 33, 64)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = [linear(x, weight) for x in inputs]
        torch.set_num_threads(8)

        def work(which: int) -> bool:
            return all(torch.equal(linear(inputs[which], weight), expected[which]) for _ in range(300))

        with ThreadPoolExecutor(4) as callers:
            assert all(callers.map(work, range(4)))
        torch.set_num_threads(2)  # fewer helpers may work than there are
        assert all(work(i) for i in range(4))
    finally:
        torch.set_num_threads(before)
