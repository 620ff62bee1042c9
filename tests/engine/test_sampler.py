"""The sampler: penalties, scores and grammars, each row by itself whatever stands beside it."""

from __future__ import annotations

import random

import engine_world as world
import pytest
import torch
from tenantry_engine import grammar
from tenantry_engine.grammar import Grammars
from tenantry_engine.sampler import Sampler
from tenantry_engine.sequence import Sampling, Sequence
from tenantry_engine.tokenizer import Tokenizer

VOCAB = 333  # wider than the tokenizer's vocabulary
EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    world.make_tokenizer(folder)
    return Tokenizer(folder)


@pytest.fixture
def sampler(tokenizer: Tokenizer) -> Sampler:
    return Sampler(Grammars(lambda: tokenizer, VOCAB, [EOS]))


def sequence(name: str, prompt: list[int], **sampling: object) -> Sequence:
    return Sequence(name, "t", list(prompt), Sampling(**{"temperature": 0.0, **sampling}), "base")  # type: ignore[arg-type]


def edited(sampler: Sampler, logits: torch.Tensor, one: Sequence) -> torch.Tensor:
    rows = logits.clone()[None]
    sampler.choose(rows, [one])
    return rows[0]


def test_penalties_are_what_their_papers_say(sampler: Sampler) -> None:
    torch.manual_seed(0)
    logits = torch.randn(VOCAB)
    one = sequence(
        "a",
        [5, 6, 6],
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias={9: 3.0},
    )
    for output in ([], [7], [7, 5, 7]):
        one.tokens[3:] = output
        want = logits.clone()
        for token in {5, 6, *output}:
            want[token] = want[token] / 1.5 if want[token] > 0 else want[token] * 1.5
        for token in set(output):
            want[token] -= 0.5 + 0.25 * output.count(token)
        want[9] += 3.0
        torch.testing.assert_close(edited(sampler, logits, one), want)


@pytest.mark.parametrize(
    ("penalty", "want"),  # of a token of the prompt, one that came once and one that came four times
    [
        ({"frequency_penalty": 0.5}, [2.0, 1.5, 0.0]),
        ({"presence_penalty": 0.5}, [2.0, 1.5, 1.5]),
        ({"repetition_penalty": 0.5}, [4.0, 4.0, 4.0]),
        ({"repetition_penalty": 2.0}, [1.0, 1.0, 1.0]),
    ],
)
def test_each_penalty_works_alone(sampler: Sampler, penalty: dict[str, float], want: list[float]) -> None:
    one = sequence("a", [5], **penalty)
    one.tokens += [6, 7, 7, 7, 7]
    found = edited(sampler, torch.full((VOCAB,), 2.0), one)
    assert found[[5, 6, 7]].tolist() == want
    assert found[8] == 2.0


def test_no_end_before_min_tokens(sampler: Sampler) -> None:
    logits = torch.zeros(VOCAB)
    logits[EOS] = 9
    one = sequence("a", [5], min_tokens=2, stop_ids=frozenset({EOS}))
    chosen = []
    for _ in range(3):
        [token] = sampler.choose(logits.clone()[None], [one]).tokens.values()
        one.tokens.append(token)
        chosen.append(token == EOS)
    assert chosen == [False, False, True]


def test_no_end_before_min_tokens_where_a_grammar_leaves_another_way(sampler: Sampler) -> None:
    one = sequence("a", [5], grammar=grammar.from_regex("a*"), min_tokens=3, stop_ids=frozenset({EOS}))
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS] = 9
    for _ in range(4):
        [token] = sampler.choose(logits.clone(), [one]).tokens.values()
        one.tokens.append(token)
    assert [token == EOS for token in one.tokens[1:]] == [False, False, False, True]


def drawn(sampler: Sampler, logits: list[float], count: int = 64, **sampling: object) -> list[int]:
    """What one sequence draws, step after step, from the same logits of the first tokens; others cannot come."""
    one = sequence("a", [5], **{"temperature": 1.0, **sampling})
    row = torch.full((1, VOCAB), float("-inf"))
    row[0, : len(logits)] = torch.tensor(logits)
    for _ in range(count):
        one.tokens += sampler.choose(row.clone(), [one]).tokens.values()
    return one.tokens[1:]


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.5}, {0, 1}),
        ({"min_p": 0.9}, {0, 1, 2}),
        ({"top_k": 1, "top_p": 0.9, "min_p": 0.1}, {0}),
    ],
)
def test_each_filter_works_alone(sampler: Sampler, asked: dict[str, float], left: set[int]) -> None:
    """Four tokens of about 30, 30, 28 and 12 percent."""
    assert set(drawn(sampler, [1.0, 0.99, 0.93, 0.1], **asked)) == left


def test_a_seed_repeats_its_draws_and_no_two_draws_of_it_are_tied(sampler: Sampler) -> None:
    even = [0.0] * 16
    first = drawn(sampler, even, seed=1)
    assert drawn(sampler, even, seed=1) == first
    assert drawn(sampler, even, seed=2) != first
    assert len(set(first)) > 8


def crowd(seed: int) -> list[Sequence]:
    """Sequences that ask for everything there is, in random mixture."""
    draw = random.Random(seed)
    rules = [None, None, grammar.from_regex("[a-f]+"), grammar.any_object()]
    return [
        sequence(
            f"{seed}-{i}",
            [draw.randrange(3, 300) for _ in range(draw.randint(1, 20))],
            temperature=draw.choice([0.0, 0.7, 1.5]),
            top_k=draw.choice([0, 20]),
            top_p=draw.choice([1.0, 0.9]),
            min_p=draw.choice([0.0, 0.02]),
            seed=draw.getrandbits(62),
            presence_penalty=draw.choice([0.0, 1.0]),
            repetition_penalty=draw.choice([1.0, 1.3]),
            logit_bias={draw.randrange(300): 4.0},
            logprobs=draw.choice([None, 0, 5]),
            grammar=draw.choice(rules),
        )
        for i in range(9)
    ]


def test_a_row_is_the_same_alone_and_in_any_crowd(sampler: Sampler) -> None:
    together, alone = crowd(1), crowd(1)
    draw = random.Random(3)
    done: set[int] = set()
    for step in range(12):
        torch.manual_seed(step)
        logits = torch.randn(len(together), VOCAB) * 3
        here = [i for i in range(len(together)) if i not in done and draw.random() < 0.8]
        draw.shuffle(here)
        if not here:
            continue
        mixed = sampler.choose(logits[here].clone(), [together[i] for i in here])
        for i in here:
            single = sampler.choose(logits[i : i + 1].clone(), [alone[i]])
            assert mixed.tokens[together[i]] == single.tokens[alone[i]]
            assert mixed.ends.get(together[i]) == single.ends.get(alone[i])
            assert mixed.scores.get(together[i]) == single.scores.get(alone[i]), "bitwise"
            for one, choices in ((together[i], mixed), (alone[i], single)):
                one.tokens.append(choices.tokens[one])
            if together[i] in mixed.ends:
                done.add(i)


def test_scores_are_of_the_models_own_distribution(sampler: Sampler) -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, VOCAB)
    want = logits.double().log_softmax(-1)
    asked = [sequence("a", [5], logprobs=4, logit_bias={11: 100.0}), sequence("b", [5])]
    choices = sampler.choose(logits, asked)
    score = choices.scores[asked[0]]
    assert asked[1] not in choices.scores
    assert choices.tokens[asked[0]] == 11
    assert score.logprob == pytest.approx(want[0, 11].item(), abs=1e-6)
    assert [token for token, _ in score.top] == want[0].topk(4).indices.tolist()
    assert [value for _, value in score.top] == pytest.approx(want[0].topk(4).values.tolist(), abs=1e-6)


def test_a_score_may_be_asked_for_without_those_of_other_tokens(sampler: Sampler) -> None:
    asked = [sequence("a", [5], logprobs=0), sequence("b", [5], logprobs=2)]
    scores = sampler.choose(torch.zeros(2, VOCAB), asked).scores
    assert [len(scores[one].top) for one in asked] == [0, 2]
    assert scores[asked[0]].logprob == scores[asked[1]].logprob


def test_a_prompt_is_scored_once_whatever_its_chunks(sampler: Sampler) -> None:
    torch.manual_seed(2)
    prompt = [5, 9, 40, 41, 7, 300]
    logits = torch.randn(len(prompt), VOCAB)
    want = logits.log_softmax(-1)
    expected = [want[i, token].item() for i, token in enumerate(prompt[1:])]
    for chunks in ([(0, 6)], [(0, 2), (2, 6)], [(0, 4), (0, 3), (3, 6)], [(0, 1), (0, 6)]):
        one = sequence(f"{chunks}", prompt, prompt_logprobs=2, logprobs=2)
        for begin, end in chunks:
            sampler.score_prompt(one, begin, logits[begin:end])
        scores = sampler.choose(logits[-1:].clone(), [one]).prompts[one]
        assert [score.logprob for score in scores] == pytest.approx(expected, abs=1e-6)
        assert scores[2].top[0][0] == want[2].argmax()
        one.tokens.append(5)
        assert not sampler.choose(logits[-1:].clone(), [one]).prompts, "told once"


def test_a_prompt_that_is_computed_again_is_not_told_again(sampler: Sampler) -> None:
    prompt = [5, 9, 40]
    logits = torch.zeros(len(prompt) + 1, VOCAB)
    one = sequence("a", prompt, prompt_logprobs=0, logprobs=0)
    sampler.score_prompt(one, 0, logits[:3])
    assert one in sampler.choose(logits[-1:].clone(), [one]).prompts
    one.tokens.append(7)
    sampler.score_prompt(one, 0, logits)  # after preemption
    assert not sampler.choose(logits[-1:].clone(), [one]).prompts


def spell(
    sampler: Sampler, tokenizer: Tokenizer, one: Sequence, limit: int = 400, seed: int = 0
) -> tuple[str, str]:
    """What random logits write under a sequence's grammar, and why it ended."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(limit):
        logits = torch.randn(1, VOCAB, generator=draw) * 2
        choices = sampler.choose(logits, [one])
        [token] = choices.tokens.values()
        one.tokens.append(token)
        if one in choices.ends:
            return tokenizer.decode(one.tokens[one.prompt_len :]), choices.ends[one]
    raise AssertionError("the structure never ended")


def test_the_grammar_has_the_last_word(sampler: Sampler, tokenizer: Tokenizer) -> None:
    """What a client forbids or demands besides cannot bring a structure to a halt."""
    rule = grammar.from_choice(["abc"])
    every = dict.fromkeys(range(100), -100.0)
    for name, more in {
        "min_tokens": {"min_tokens": 50, "stop_ids": frozenset({EOS})},
        "stops": {"min_tokens": 50, "stop_ids": frozenset(range(VOCAB))},
        "bias": {"logit_bias": every},
        "hot": {"temperature": 2.0, "top_p": 0.1, "min_p": 1.0, "seed": 5},
    }.items():
        text, end = spell(sampler, tokenizer, sequence(name, [5], grammar=rule, **more))
        assert (text, end) == ("abc", "stop"), name


def test_what_goes_with_the_sequence_is_forgotten(sampler: Sampler, tokenizer: Tokenizer) -> None:
    one = sequence("a", [5], grammar=grammar.from_choice(["x"]), repetition_penalty=1.2)
    spell(sampler, tokenizer, one)
    assert len(sampler._matching) == len(sampler._seen) == 1
    del one
    assert len(sampler._matching) == len(sampler._seen) == 0
