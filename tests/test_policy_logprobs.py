"""Selected log-probs: hand-computed values, equality with full log_softmax, precision, heads of every kind."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gspo.policy import logprobs as module
from gspo.policy.logprobs import logit_transform_of, logprobs_of, selected_logprobs

SIZES = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def reference(hidden, head, targets, temperature=1.0, transform=None):
    """The definition, with all logits at once."""
    logits = head(hidden)
    logits = logits if transform is None else transform(logits)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits / temperature, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def both(hidden, head, targets, weights, **options):
    """(values, gradients) of selected_logprobs and of the definition. Gradients: hidden, then the parameters."""
    chunk_size = options.pop("chunk_size", None)
    outcomes = []
    for selected in (True, False):
        leaf = hidden.detach().clone().requires_grad_()
        parameters = [p for p in head.parameters() if p.requires_grad]
        if selected:
            values, _ = selected_logprobs(
                leaf,
                head,
                targets,
                chunk_size=chunk_size,
                temperature=options.get("temperature", 1.0),
                logit_transform=options.get("transform"),
            )
        else:
            values = reference(leaf, head, targets, **options)
        gradients = torch.autograd.grad((values * weights).sum(), [leaf, *parameters])
        outcomes.append((values.detach(), gradients))
    return outcomes


def assert_equal(outcomes, atol):
    (values, gradients), (wanted, wanted_gradients) = outcomes
    torch.testing.assert_close(values, wanted, rtol=0, atol=atol)
    assert len(gradients) == len(wanted_gradients)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=atol)


def case(tokens=7, hidden_size=5, vocab_size=11, dtype=torch.float32, seed=0, bias=False):
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(hidden_size, vocab_size, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    hidden = torch.randn(tokens, hidden_size, generator=generator, dtype=dtype)
    targets = torch.randint(0, vocab_size, (tokens,), generator=generator)
    weights = torch.randn(tokens, generator=generator, dtype=dtype)
    return hidden, head, targets, weights


# --- logprobs_of --------------------------------------------------------------------------------------------


def test_logits_are_divided_by_the_temperature():
    logits, target = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
    halved = logprobs_of(logits, target, 0.5).item()
    assert halved == pytest.approx(-0.142932, abs=1e-6)
    assert logprobs_of(logits, target).item() == pytest.approx(-0.407606, abs=1e-6)
    # dividing the log-prob instead would give -0.815212
    assert halved != pytest.approx(-0.407606 / 0.5, abs=1e-2)


def test_rows_may_have_their_own_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    found = logprobs_of(logits, torch.tensor([0, 0]), torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(found, torch.tensor([-0.142932, -0.407606]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be > 0"):
        logprobs_of(torch.zeros(1, 3), torch.tensor([0]), temperature)


@pytest.mark.parametrize("target", [-100, -1, 3])
def test_a_target_outside_the_vocabulary_is_an_error_and_never_zero(target):
    with pytest.raises(IndexError):
        logprobs_of(torch.zeros(1, 3), torch.tensor([target]))


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"\[N, V\]"):
        logprobs_of(torch.zeros(2, 3), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"\[N, H\]"):
        selected_logprobs(torch.zeros(2, 3), nn.Linear(3, 4), torch.tensor([0]))
    with pytest.raises(ValueError, match="chunk_size"):
        selected_logprobs(torch.zeros(1, 3), nn.Linear(3, 4), torch.tensor([0]), chunk_size=0)


def test_large_logits_keep_their_precision():
    logits = torch.tensor([[1000.0, 999.0, 998.0]])
    found = logprobs_of(logits, torch.tensor([0])).item()
    assert found == pytest.approx(-0.4076059644, abs=1e-6)


def test_minus_infinity_is_a_token_of_probability_zero():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    values = logprobs_of(logits, torch.tensor([0]))
    assert values.item() == pytest.approx(-math.log(2), abs=1e-6)
    values.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5, 0.0]]))


# --- selected_logprobs against the definition ---------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_full_log_softmax(chunk_size, bias, temperature):
    hidden, head, targets, weights = case(bias=bias)
    outcomes = both(hidden, head, targets, weights, chunk_size=chunk_size, temperature=temperature)
    assert_equal(outcomes, 2e-6)


@pytest.mark.parametrize("chunk_size", [2, 100])
def test_float64_stays_float64_and_equals_to_machine_precision(chunk_size):
    hidden, head, targets, weights = case(dtype=torch.float64, bias=True)
    outcomes = both(hidden, head, targets, weights, chunk_size=chunk_size, temperature=0.6)
    assert outcomes[0][0].dtype == torch.float64
    assert_equal(outcomes, 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 9),
    vocab_size=st.integers(1, 12),
    chunk_size=st.integers(1, 10),
    temperature=st.floats(0.2, 3.0),
    capped=st.booleans(),
)
def test_any_chunking_gives_one_result(tokens, vocab_size, chunk_size, temperature, capped):
    hidden, head, targets, weights = case(tokens, 4, vocab_size, torch.float64, seed=tokens)
    transform = (lambda z: 3.0 * torch.tanh(z / 3.0)) if capped else None
    options = {"temperature": temperature, "transform": transform}
    assert_equal(both(hidden, head, targets, weights, chunk_size=chunk_size, **options), 1e-10)


def test_the_written_out_gradient_passes_finite_differences():
    hidden, head, targets, _ = case(tokens=4, dtype=torch.float64, bias=True)

    def function(hidden, weight, bias):
        copied = nn.Linear(5, 11, dtype=torch.float64)
        copied.weight, copied.bias = nn.Parameter(weight), nn.Parameter(bias)
        copied._parameters.update(weight=weight, bias=bias)  # the leaves that gradcheck moves
        return selected_logprobs(hidden, copied, targets, temperature=0.8, chunk_size=3)[0]

    leaves = [t.detach().clone().requires_grad_() for t in (hidden, head.weight, head.bias)]
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("chunk_size", [1, 5])
def test_no_tokens(chunk_size):
    hidden, head, targets, _ = case(tokens=0)
    hidden.requires_grad_()
    values, entropies = selected_logprobs(hidden, head, targets, chunk_size=chunk_size, with_entropy=True)
    assert values.shape == (0,) and entropies is not None and entropies.shape == (0,)
    values.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 5)


def test_under_no_grad_nothing_is_recorded():
    hidden, head, targets, _ = case()
    with torch.no_grad():
        values, _ = selected_logprobs(hidden, head, targets, chunk_size=2)
    assert not values.requires_grad
    torch.testing.assert_close(values, reference(hidden, head, targets).detach(), rtol=0, atol=1e-6)


def test_never_holds_more_logits_than_a_chunk():
    class Watched(nn.Linear):
        widest = 0

        def forward(self, part):
            Watched.widest = max(Watched.widest, len(part))
            return super().forward(part)

    hidden, _, targets, weights = case(tokens=50)
    values, _ = selected_logprobs(hidden.requires_grad_(), Watched(5, 11), targets, chunk_size=8)
    (values * weights).sum().backward()
    assert Watched.widest == 8


def test_the_default_chunk_fills_the_byte_budget(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES_CPU", 4 * 11 * 6)
    hidden = torch.zeros(1, 5)
    assert module._default_chunk(nn.Linear(5, 11), hidden) == 6
    assert module._default_chunk(lambda part: part @ torch.zeros(5, 11), hidden) == 6
    assert module._default_chunk(nn.Linear(5, 1000), hidden) == 1


# --- precision ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [3, 100])
def test_log_softmax_is_float32_under_autocast(chunk_size):
    hidden, head, targets, weights = case(tokens=6, hidden_size=16, vocab_size=64)
    hidden.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        values, _ = selected_logprobs(hidden, head, targets, chunk_size=chunk_size)
        logits = head(hidden)
        assert logits.dtype == torch.bfloat16
    assert values.dtype == torch.float32
    wanted = torch.log_softmax(logits.float(), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(values, wanted, rtol=0, atol=1e-6)
    (values * weights).sum().backward()
    assert head.weight.grad is not None and head.weight.grad.dtype == torch.float32
    exact = torch.autograd.grad((reference(hidden, head, targets) * weights).sum(), head.weight)[0]
    assert (head.weight.grad - exact).abs().max() < 0.02 * exact.abs().max()


def test_bfloat16_weights_sum_their_gradient_in_float32():
    hidden, head, targets, weights = case(tokens=64, hidden_size=8, vocab_size=16)
    head, hidden = head.bfloat16(), hidden.bfloat16()
    exact = copy.deepcopy(head).double()
    (reference(hidden.double(), exact, targets) * weights.double()).sum().backward()
    values, _ = selected_logprobs(hidden, head, targets, chunk_size=1)
    (values * weights).sum().backward()
    assert values.dtype == torch.float32 and head.weight.grad.dtype == torch.bfloat16
    error = (head.weight.grad.double() - exact.weight.grad).abs().max()
    assert error < 0.01 * exact.weight.grad.abs().max()


def test_k3_of_a_bfloat16_model_is_not_negative():
    hidden, head, targets, _ = case(tokens=200, hidden_size=16, vocab_size=64)
    head = head.bfloat16()
    current, _ = selected_logprobs(hidden.bfloat16(), head, targets)
    reference_logprobs, _ = selected_logprobs((hidden + 0.05).bfloat16(), head, targets)
    log_ratio = (reference_logprobs - current).detach()
    assert (torch.expm1(log_ratio) - log_ratio).min() >= -1e-6


# --- entropy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [2, 100])
def test_entropy_is_right_and_has_no_gradient(chunk_size):
    hidden, head, targets, _ = case()
    hidden.requires_grad_()
    values, entropies = selected_logprobs(
        hidden, head, targets, temperature=0.5, chunk_size=chunk_size, with_entropy=True
    )
    probs = torch.softmax(head(hidden) / 0.5, -1)
    wanted = torch.distributions.Categorical(probs=probs.detach()).entropy()
    torch.testing.assert_close(entropies, wanted, rtol=0, atol=1e-5)
    assert values.requires_grad and not entropies.requires_grad


def test_entropy_by_hand():
    uniform = nn.Linear(1, 4, bias=False)
    nn.init.zeros_(uniform.weight)
    _, entropies = selected_logprobs(torch.ones(1, 1), uniform, torch.tensor([0]), with_entropy=True)
    assert entropies.item() == pytest.approx(math.log(4), abs=1e-6)
    masked = lambda part: torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])  # noqa: E731
    _, entropies = selected_logprobs(torch.ones(1, 1), masked, torch.tensor([0]), with_entropy=True)
    assert entropies.item() == pytest.approx(math.log(2), abs=1e-6)


# --- heads --------------------------------------------------------------------------------------------------


def test_tied_embeddings_get_both_gradients():
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).double()
    ids = torch.randint(0, 41, (1, 9))

    def gradient(chunk_size):
        model.zero_grad()
        hidden = model.model(ids).last_hidden_state[0, :-1]
        if chunk_size:
            values, _ = selected_logprobs(hidden, model.lm_head, ids[0, 1:], chunk_size=chunk_size)
        else:
            values = reference(hidden, model.lm_head, ids[0, 1:])
        values.sum().backward()
        return model.model.embed_tokens.weight.grad.clone()

    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(gradient(3), gradient(None), rtol=0, atol=1e-6)


def test_a_lora_wrapped_head_trains_its_adapter():
    torch.manual_seed(0)
    base = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    head = model.get_base_model().lm_head
    hidden, targets, weights = torch.randn(7, 32), torch.randint(0, 41, (7,)), torch.randn(7)
    outcomes = both(hidden, head, targets, weights, chunk_size=3)
    assert len(outcomes[0][1]) == 3  # hidden, lora_A, lora_B: the base weight is frozen
    assert all(gradient.abs().max() > 0 for gradient in outcomes[0][1])
    assert_equal(outcomes, 5e-6)


def test_hooks_on_the_head_are_not_skipped():
    hidden, head, targets, _ = case()
    head.register_forward_hook(lambda module, args, output: output * 2)
    values, _ = selected_logprobs(hidden.requires_grad_(), head, targets, chunk_size=2)
    torch.testing.assert_close(values, reference(hidden, head, targets), rtol=0, atol=1e-6)


def test_a_frozen_head_gets_no_gradient_and_hidden_does():
    hidden, head, targets, weights = case()
    head.requires_grad_(False)
    assert_equal(both(hidden, head, targets, weights, chunk_size=3), 1e-6)
    values, _ = selected_logprobs(hidden.requires_grad_(), head, targets, chunk_size=3)
    values.sum().backward()
    assert head.weight.grad is None and hidden.grad is not None


def test_frozen_hidden_states_still_train_the_head():
    hidden, head, targets, _ = case()
    values, _ = selected_logprobs(hidden, head, targets, chunk_size=3)
    values.sum().backward()
    wanted = torch.autograd.grad(reference(hidden, head, targets).sum(), head.weight)[0]
    torch.testing.assert_close(head.weight.grad, wanted, rtol=0, atol=2e-6)


# --- what models do after their head ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (Qwen3ForCausalLM, Qwen3Config(**SIZES)),
        (Gemma2ForCausalLM, Gemma2Config(**SIZES, final_logit_softcapping=2.0)),
        (GraniteForCausalLM, GraniteConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}, logits_scaling=3.0)),
        (CohereForCausalLM, CohereConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}, logit_scale=0.25)),
    ],
    ids=["qwen3", "gemma2", "granite", "cohere"],
)
def test_hidden_head_transform_equals_the_models_own_logits(model_class, config):
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
        ids = torch.randint(0, 41, (2, 6))
        logits = model(ids).logits
        head_logits = model.get_output_embeddings()(model.get_decoder()(ids).last_hidden_state)
        transform = logit_transform_of(model.config)
        found = head_logits if transform is None else transform(head_logits)
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-6)
    assert (transform is None) == (model_class is Qwen3ForCausalLM)
    if transform is not None:
        assert (head_logits - logits).abs().max() > 0.1
