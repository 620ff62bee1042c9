"""Sampling: greedy, the filters, the distribution, and draws that depend on seed and step alone."""

import pytest
import torch
from tenantry_kernels import sample, uniform
from tenantry_kernels.sample import reference


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, steps=None):
    n = logits.shape[0]
    return sample(
        logits,
        torch.full((n,), temperature),
        torch.full((n,), top_k),
        torch.full((n,), top_p),
        torch.full((n,), min_p),
        torch.arange(n) if seeds is None else seeds,
        torch.zeros(n, dtype=torch.int64) if steps is None else steps,
    )


LOGITS = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()


def frequencies(**filters):
    many = 20000
    ids = draw(LOGITS.expand(many, 5), **filters)
    return torch.bincount(ids, minlength=5).float() / many


def test_temperature_zero_is_greedy() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 300)
    assert torch.equal(draw(logits, temperature=0.0), logits.argmax(-1))
    assert torch.equal(draw(logits, top_k=1), logits.argmax(-1))
    assert torch.equal(draw(logits, top_p=1e-9), logits.argmax(-1))
    assert torch.equal(draw(logits, min_p=1.0), logits.argmax(-1))


def test_frequencies_follow_the_probabilities() -> None:
    torch.testing.assert_close(frequencies(), LOGITS.exp(), atol=0.02, rtol=0)
    sharp = (LOGITS / 0.5).softmax(-1)
    torch.testing.assert_close(frequencies(temperature=0.5), sharp, atol=0.02, rtol=0)


def test_filters_keep_what_they_say() -> None:
    assert (frequencies(top_k=2) > 0).tolist() == [True, True, False, False, False]
    assert (frequencies(top_p=0.69) > 0).tolist() == [True, True, False, False, False]
    assert (frequencies(top_p=0.71) > 0).tolist() == [True, True, True, False, False]
    assert (frequencies(min_p=0.25) > 0).tolist() == [True, True, True, False, False]
    assert (frequencies(top_k=4, top_p=0.9) > 0).tolist() == [True, True, True, True, False]


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.zeros(5000, 4)
    logits[:, 2:] = float("-inf")
    assert draw(logits).max() == 1


def test_a_row_depends_on_its_seed_and_step_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 1000)
    seeds, steps = torch.arange(16) * 7 - 30, torch.arange(16)
    crowd = draw(logits, seeds=seeds, steps=steps)
    for i in range(16):
        alone = draw(logits[i : i + 1], seeds=seeds[i : i + 1], steps=steps[i : i + 1])
        assert alone.item() == crowd[i].item()
    assert not torch.equal(draw(logits, seeds=seeds, steps=steps + 1), crowd)
    assert not torch.equal(draw(logits, seeds=seeds + 1, steps=steps), crowd)


def test_mixed_greedy_and_drawn_rows() -> None:
    logits = LOGITS.expand(64, 5).contiguous()
    temperature = torch.tensor([0.0, 1.0]).repeat(32)
    args = (
        torch.zeros(64, dtype=torch.int64),
        torch.ones(64),
        torch.zeros(64),
        torch.arange(64),
        torch.zeros(64, dtype=torch.int64),
    )
    ids = sample(logits, temperature, *args)
    assert (ids[::2] == 0).all()
    assert len(set(ids[1::2].tolist())) > 1


def test_uniform_is_uniform_over_seeds_and_over_steps() -> None:
    for seeds, steps in (
        (torch.arange(50000), torch.zeros(50000)),
        (torch.zeros(50000), torch.arange(50000)),
    ):
        values = uniform(seeds, steps)
        assert values.min() >= 0
        assert values.max() < 1
        counts = torch.histc(values.float(), bins=10, min=0, max=1) / 50000
        torch.testing.assert_close(counts, torch.full((10,), 0.1), atol=0.01, rtol=0)


@pytest.mark.parametrize("vocab", [2, 300, 5000])
def test_extension_draws_what_the_reference_draws(vocab) -> None:
    """Every filter alone and together, with equal logits, forbidden tokens, both zeros and greedy rows."""
    torch.manual_seed(vocab)
    rows = 420
    logits = torch.randn(rows, vocab) * 3
    logits[::3] = logits[::3].round()
    logits[::7, vocab // 2 :] = float("-inf")
    logits[5::11, :2] = torch.tensor([-0.0, 0.0])
    index = torch.arange(rows)
    call = (
        logits,
        torch.tensor([0.0, 1.0, 0.3, 2.0])[index % 4],
        torch.tensor([0, 1, 3, vocab // 2, vocab, vocab + 5, 7])[index % 7],
        torch.tensor([1.0, 0.9, 0.5, 0.0, 0.99])[index % 5],
        torch.tensor([0.0, 0.1, 1.0])[index % 3],
        index * 77 - 5,
        index % 13,
    )
    got = sample(*call)
    assert torch.equal(got, reference(*call))
    for row in (0, 8, 33):  # a row's draw is its own, also as a view with a stride
        alone = [tensor[row : row + 1] for tensor in call]
        assert sample(*alone).item() == got[row].item()


def test_nan_ends_no_process_and_draws_a_token_of_the_vocabulary() -> None:
    logits = torch.full((2, 300), float("nan"))
    logits[1, 5] = 1.0
    assert all(
        0 <= token < 300 for token in draw(logits, top_k=3).tolist() + draw(logits, top_p=0.5).tolist()
    )


def test_wrong_columns_are_refused() -> None:
    with pytest.raises(RuntimeError, match="`seeds` must be"):
        draw(LOGITS.expand(2, 5), seeds=torch.zeros(3, dtype=torch.int64))
