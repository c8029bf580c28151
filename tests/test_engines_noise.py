"""Noise and drawing: the hash against an independent one, exact probabilities, impossible tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.engines.noise import draw, inverse_cdf, uniforms

MASK = 2**64 - 1


def splitmix(state):
    """SplitMix64's finaliser in Python's unbounded integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def reference(seed, position):
    gamma = 0x9E3779B97F4A7C15
    stream = splitmix((seed + gamma) & MASK)
    return (splitmix((stream + (position + 1) * gamma) & MASK) >> 11) * 2.0**-53


def test_the_finaliser_is_splitmix64():
    # the published first outputs of SplitMix64 seeded with 0
    assert [hex(splitmix(n * 0x9E3779B97F4A7C15 & MASK)) for n in (1, 2)] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
    ]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**31))
def test_uniforms_equal_the_reference(seed, position):
    found = uniforms(torch.tensor([seed]), torch.tensor([position])).item()
    assert found == reference(seed, position)
    assert 0.0 <= found < 1.0


def test_uniforms_are_uniform_and_uncorrelated():
    noise = uniforms(torch.arange(1000).unsqueeze(1), torch.arange(400)).numpy()  # small seeds, neighbours
    assert noise.shape == (1000, 400)
    counts = np.histogram(noise, bins=100, range=(0, 1))[0]
    chi_square = ((counts - 4000) ** 2 / 4000).sum()  # 99 degrees of freedom: mean 99, sd 14
    assert 50 < chi_square < 160
    for left, right in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:]), (noise[1:, :-1], noise[:-1, 1:])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.01


def test_the_first_token_above_the_noise_is_drawn():
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).expand(6, -1)
    noise = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(probs, noise).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("vocab_size", [5, 1024, 1025, 5000])
def test_every_vocabulary_size_agrees_with_a_plain_search(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    probs = torch.softmax(4 * torch.randn(64, vocab_size, generator=generator), -1)
    noise = torch.rand(64, generator=generator, dtype=torch.float64)
    cumulative = probs.double().cumsum(-1)
    wanted = torch.searchsorted(cumulative, (noise * cumulative[:, -1]).unsqueeze(1), right=True).squeeze(1)
    assert inverse_cdf(probs, noise).tolist() == wanted.tolist()


@pytest.mark.parametrize("vocab_size", [7, 3000])
def test_tokens_of_probability_zero_are_never_drawn(vocab_size):
    probs = torch.zeros(1, vocab_size)
    probs[0, [2, vocab_size - 3]] = torch.tensor([0.3, 0.7])
    edges = [0.0, 0.3, math.nextafter(0.3, 0), math.nextafter(0.3, 1), 1 - 2**-53, 0.9999999999]
    noise = torch.tensor(edges, dtype=torch.float64)
    drawn = set(inverse_cdf(probs.expand(len(edges), -1), noise).tolist())
    assert drawn == {2, vocab_size - 3}


@pytest.mark.parametrize("vocab_size", [6, 2000])
def test_frequencies_are_the_probabilities(vocab_size):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, vocab_size, generator=generator) * 2
    count = 20_000
    noise = uniforms(torch.arange(count), torch.tensor([17]))
    tokens, _ = draw(logits.expand(count, -1), noise, temperature=torch.full((count,), 0.8))
    probs = torch.softmax(logits[0] / 0.8, -1).double()
    top = probs.argsort(descending=True)[:5]
    found = torch.bincount(tokens, minlength=vocab_size)[top] / count
    error = (found - probs[top]) / (probs[top] * (1 - probs[top]) / count).sqrt()
    assert error.abs().max() < 4  # standard errors; the noise is fixed, so this cannot flicker


def test_greedy_rows_are_scored_at_temperature_one():
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    noise = torch.tensor([0.99, 0.99], dtype=torch.float64)
    greedy = torch.tensor([True, False])
    tokens, logprobs = draw(logits, noise, temperature=torch.tensor([1.0, 0.5]), greedy=greedy)
    assert tokens.tolist() == [0, 2]
    torch.testing.assert_close(logprobs, torch.tensor([-0.407606, -4.142932]), rtol=0, atol=1e-6)
    tokens, _ = draw(logits, None, temperature=torch.ones(2), greedy=torch.tensor([True, True]))
    assert tokens.tolist() == [0, 0]


def test_bfloat16_logits_give_float32_logprobs():
    _, logprobs = draw(torch.randn(3, 9).bfloat16(), torch.rand(3).double(), temperature=torch.ones(3))
    assert logprobs.dtype == torch.float32


@pytest.mark.parametrize("vocab_size", [5, 3000])
def test_logits_that_are_not_finite_give_a_nan_logprob(vocab_size):
    logits = torch.zeros(2, vocab_size)
    logits[0, 1] = math.nan
    tokens, logprobs = draw(logits, torch.rand(2).double(), temperature=torch.ones(2))
    assert logprobs.isnan().tolist() == [True, False]
    assert int(tokens.max()) < vocab_size
