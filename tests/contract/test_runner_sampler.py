"""Sampling: each setting against an independent reference, with reproducible draws."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as generation

from baton.core.output import PROCESSED_LOGPROBS, Failure, FailureCause, TokenLogprobs
from baton.core.sampling import MAX_LOGPROBS, SamplingParams
from baton.engine.runner.device.step_inputs import SHARED_INPUTS
from baton.engine.runner.kernels.choose import native_parts
from baton.engine.runner.kernels.native_sampling import NativeSampling
from baton.engine.runner.model.pass_layout import TokenRun
from baton.engine.runner.sampling.logprobs import read_logprobs
from baton.engine.runner.sampling.sampler import (
    ALL_TOKENS_FORBIDDEN,
    NOT_FINITE,
    Choice,
    Sampler,
)
from baton.engine.runner.sampling.sampling import SampledRows
from baton.engine.runner.sampling.torch_sampling import (
    TOP_P_CANDIDATES,
    TORCH_SAMPLING,
    SamplingBackend,
    draw_keys,
    exponential_numbers,
)
from baton.engine.structured_output.grammar import num_words
from tests.support.hypothesis_profiles import num_examples
from tests.support.kernels import kernels_by_variant
from tests.support.token_runs import allow_only, make_run, sample
from tests.support.triton_parts import triton_sampling

VOCAB_SIZE = 50
EOS = (7, 8)


def row(
    known: Sequence[int] = (1, 2, 3),
    *,
    num_prompt: int | None = None,
    seed: int = 0,
    **requested: Any,
) -> TokenRun:
    return make_run(known, SamplingParams(**requested), num_prompt_tokens=num_prompt, seed=seed)


def native_sampling() -> SamplingBackend:
    return native_parts().sampling


def native_samplings() -> list[SamplingBackend]:
    """Return that of each instruction set that this processor supports."""
    return [NativeSampling(kernels) for kernels in kernels_by_variant().values()]


BACKENDS = {"torch": lambda: TORCH_SAMPLING, "native": native_sampling, "triton": triton_sampling}


@pytest.fixture(scope="module", params=BACKENDS)
def sampling(request: pytest.FixtureRequest) -> SamplingBackend:
    return BACKENDS[request.param]()


@pytest.fixture(
    scope="module", params=["torch", "native", pytest.param("triton", marks=pytest.mark.triton)]
)
def sampling_at_length(request: pytest.FixtureRequest) -> SamplingBackend:
    """Return each implementation, for tests that take Triton's interpreter long."""
    return BACKENDS[request.param]()


def constrained_logits(sampling: SamplingBackend, logits: Tensor, *rows: TokenRun) -> Tensor:
    sampled = SampledRows(rows, EOS, logits.shape[1], logits.device)
    return sampling.begin(sampled, SHARED_INPUTS).constrain(logits)


def random_logits(*shape: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * spread


def choose(
    logits: Tensor, *rows: TokenRun, sampling: SamplingBackend = TORCH_SAMPLING
) -> list[Choice]:
    return sample(Sampler(EOS, sampling=sampling), logits, rows).choices


def draw_many(logits: Tensor, num: int, **requested: Any) -> Counter[int]:
    """Draw once per seed from the same row of logits."""
    rows = [row(seed=seed, **requested) for seed in range(num)]
    drawn: Counter[int] = Counter()
    for token_id in choose(logits.expand(num, -1), *rows):
        assert isinstance(token_id, int)
        drawn[token_id] += 1
    return drawn


def assert_drawn_by(probabilities: Tensor, drawn: Counter[int]) -> None:
    """Check draws by a chi-square test; tokens of zero probability must not be drawn."""
    total = sum(drawn.values())
    assert all(probabilities[token_id] > 0 for token_id in drawn)
    expected = probabilities.double() * total
    common = [token for token in range(len(expected)) if expected[token] >= 5]
    statistic = sum((drawn[t] - float(expected[t])) ** 2 / float(expected[t]) for t in common)
    # Its mean is one less than its cells and its variance twice that: five sigmas.
    degrees = max(len(common) - 1, 1)
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


# --- the draw ---------------------------------------------------------------------------


def test_greedy_sampling_takes_the_most_likely_token(sampling: SamplingBackend) -> None:
    logits = random_logits(4, VOCAB_SIZE)

    tokens = choose(logits, *[row(temperature=0.0)] * 4, sampling=sampling)

    assert tokens == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    logits = random_logits(VOCAB_SIZE)

    drawn = draw_many(logits, 8_000, temperature=temperature)

    assert_drawn_by((logits / temperature).softmax(dim=0), drawn)


@given(seed=st.integers(0, 2**32), vocab_size=st.sampled_from((17, 50, 1000, 5000)))
@settings(max_examples=num_examples(60))
def test_native_draws_are_those_of_torch(seed: int, vocab_size: int) -> None:
    drawn = random.Random(seed)
    logits = random_logits(6, vocab_size, seed=seed, spread=drawn.choice((0.5, 2.0, 8.0)))
    logits[:, :: drawn.choice((2, 3, 100))] = float("-inf")
    rows = [
        row(
            seed=drawn.getrandbits(32),
            temperature=drawn.choice((0.0, 0.1, 1.0, 2.0)),
            top_k=drawn.choice((0, 0, 1, 3, 20, 60_000)),
            top_p=drawn.choice((1.0, 1.0, 0.1, 0.5, 0.95, 0.999)),
            min_p=drawn.choice((0.0, 0.0, 0.01, 0.5)),
        )
        for _ in logits
    ]

    by_torch = choose(logits, *rows)

    for backend in native_samplings():
        assert choose(logits, *rows, sampling=backend) == by_torch


def test_a_native_draw_keeps_all_ties_at_the_last_rank() -> None:
    logits = torch.zeros(1, 5000)

    drawn = {
        choose(logits, row(seed=seed, top_k=5, temperature=1.0), sampling=native_sampling())[0]
        for seed in range(40)
    }

    assert len(drawn) > 30


def warped(logits: Tensor, *warpers: Any) -> Tensor:
    """Return the distribution after transformers' own warpers, applied in this order."""
    scores = logits[None]
    for warper in warpers:
        scores = warper(None, scores)
    return scores[0].softmax(dim=0)


@pytest.mark.parametrize(
    ("requested", "warpers"),
    [
        ({"top_k": 1}, [generation.TopKLogitsWarper(1)]),
        ({"top_k": 5}, [generation.TopKLogitsWarper(5)]),
        ({"top_p": 0.7}, [generation.TopPLogitsWarper(0.7)]),
        ({"top_p": 1e-6}, [generation.TopPLogitsWarper(1e-6)]),
        ({"min_p": 0.1}, [generation.MinPLogitsWarper(0.1)]),
        ({"min_p": 1.0}, [generation.MinPLogitsWarper(1.0)]),
        (
            {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 1.7},
            [
                generation.TemperatureLogitsWarper(1.7),
                generation.MinPLogitsWarper(0.02),
                generation.TopKLogitsWarper(20),
                generation.TopPLogitsWarper(0.8),
            ],
        ),
    ],
    ids=["k1", "k5", "p0.7", "p-tiny", "min-p0.1", "min-p1", "all"],
)
def test_draws_follow_the_distribution_of_transformers_warpers(
    requested: dict[str, float], warpers: list[Any]
) -> None:
    logits = random_logits(VOCAB_SIZE, seed=3)

    drawn = draw_many(logits, 5_000, **requested)

    probabilities = warped(logits, *warpers)
    assert_drawn_by(probabilities, drawn)
    often = [t for t in range(VOCAB_SIZE) if probabilities[t] > 0.003]
    assert all(drawn[token_id] for token_id in often)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])
def test_top_p_of_a_flat_distribution_considers_the_whole_vocabulary(top_p: float) -> None:
    vocab_size = 4 * TOP_P_CANDIDATES
    logits = random_logits(vocab_size, seed=5, spread=0.1)
    probabilities = warped(logits, generation.TopPLogitsWarper(top_p))
    further = probabilities.clone()
    further[logits.topk(TOP_P_CANDIDATES).indices] = 0.0

    drawn = draw_many(logits, 600, top_p=top_p)

    assert sum(drawn[t] for t in range(vocab_size) if probabilities[t] == 0) <= 1  # rounding
    found = sum(drawn[t] for t in range(vocab_size) if further[t] > 0)
    expected = 600 * float(further.sum())
    assert expected > 30
    assert found == pytest.approx(expected, abs=5 * math.sqrt(expected))


def test_ties_at_the_top_k_limit_are_all_kept() -> None:
    logits = torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0])

    drawn = draw_many(logits, 2_000, top_k=2)

    assert set(drawn) == {0, 1, 2, 3}


def test_equal_tokens_at_the_top_p_limit_are_kept_in_the_order_of_their_ids(
    sampling: SamplingBackend,
) -> None:
    seeds = range(28, 33)  # which draw different tokens
    rows = [row(seed=seed, top_p=0.55) for seed in seeds]

    choices = choose(torch.zeros(len(rows), 8), *rows, sampling=sampling)

    assert set(choices) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("temperature", [1e-5, 1e-40, 5e-324])
def test_a_tiny_temperature_is_greedy(sampling: SamplingBackend, temperature: float) -> None:
    logits = random_logits(6, VOCAB_SIZE)

    tokens = choose(
        logits, *[row(temperature=temperature, seed=i) for i in range(6)], sampling=sampling
    )

    assert tokens == logits.argmax(dim=-1).tolist()


def random_times(seeds: Sequence[int], positions: Sequence[int], token_ids: Tensor) -> Tensor:
    keys = torch.from_numpy(draw_keys(seeds, positions))[:, None]
    return exponential_numbers(keys, token_ids.expand(len(keys), -1))


def test_the_random_numbers_of_draws_are_exponential() -> None:
    token_ids = torch.arange(2_000)
    times = random_times(range(50), [3] * 50, token_ids).double()

    assert times.min() > 0
    assert float(times.mean()) == pytest.approx(1.0, abs=0.02)
    assert float(times.var()) == pytest.approx(1.0, abs=0.05)
    # Neighbours in each of the three keys are independent.
    for other in (
        random_times(range(1, 51), [3] * 50, token_ids),
        random_times(range(50), [4] * 50, token_ids),
        random_times(range(50), [3] * 50, token_ids + 1),
    ):
        together = torch.stack([times.flatten(), other.double().flatten()])
        assert abs(float(together.corrcoef()[0, 1])) < 0.02


def test_the_random_numbers_of_draws_never_change() -> None:
    """A request that migrates to another node or build keeps its tokens."""
    times = random_times([0, 1, 2**63 - 1, -5], [0, 1, 10**6, 7], torch.arange(2))

    assert times.flatten().tolist() == pytest.approx(GOLDEN_TIMES, rel=1e-6)


GOLDEN_TIMES = [
    0.149323329,
    3.54398576,
    1.78594212,
    0.860053647,
    0.574042398,
    0.732675002,
    0.351244127,
    2.22832338,
]


# --- independence of the batch ------------------------------------------------------------

REQUESTED = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 0, 1, 5, 40]),
        "top_p": st.sampled_from([1.0, 1.0, 0.5, 0.95]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "min_tokens": st.sampled_from([0, 4]),
        "logit_bias": st.sampled_from([{}, {3: 5.0}]),
    }
)


@given(requested=st.lists(REQUESTED, min_size=2, max_size=6), seed=st.integers(0, 2**20))
@settings(max_examples=num_examples(60))
def test_a_choice_depends_on_its_own_row_alone(requested: list[dict[str, Any]], seed: int) -> None:
    logits = random_logits(len(requested), VOCAB_SIZE, seed=seed)
    before = logits.clone()
    rows = [
        row((1, 3, 3, 5), num_prompt=2, seed=seed + i, **each) for i, each in enumerate(requested)
    ]

    together = choose(logits, *rows)

    assert together == [choose(logits[i : i + 1], each)[0] for i, each in enumerate(rows)]
    assert torch.equal(logits, before)


def test_seed_and_position_decide_the_draw() -> None:
    logits = torch.zeros(1, 5_000)

    def drawn(seed: int, num_known: int) -> Choice:
        return choose(logits, row([1] * num_known, seed=seed))[0]

    assert drawn(1, 5) == drawn(1, 5)
    assert len({drawn(seed, num) for seed in range(5) for num in range(5)}) == 25


# --- implementations agree ----------------------------------------------------------------

# No top-p is a sum of equal probabilities: rounding would decide about a token.
DRAWN = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 0, 1, 5, 40, 2**31 - 1]),
        "top_p": st.sampled_from([1.0, 1e-6, 0.37, 0.901, 0.991]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    }
)


FILTERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"top_k": 50},
    {"top_p": 0.9},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
)


@pytest.mark.parametrize("vocab_size", [130, pytest.param(151_936, marks=pytest.mark.triton)])
def test_triton_draws_the_tokens_of_torch(vocab_size: int) -> None:
    rows = [row(seed=seed, **each) for seed, each in enumerate(FILTERS)]
    logits = random_logits(len(rows), vocab_size)

    assert choose(logits, *rows, sampling=triton_sampling()) == choose(logits, *rows)


@pytest.mark.triton
@given(
    requested=st.lists(DRAWN, min_size=1, max_size=4),
    has_ties=st.booleans(),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=num_examples(25))
def test_triton_draws_the_tokens_of_torch_with_any_filters(
    requested: list[dict[str, Any]], has_ties: bool, seed: int
) -> None:
    logits = random_logits(len(requested), VOCAB_SIZE, seed=seed)
    logits = logits.round() if has_ties else logits
    rows = [row(seed=seed + i, **each) for i, each in enumerate(requested)]

    together = choose(logits, *rows, sampling=triton_sampling())

    assert together == choose(logits, *rows)
    assert together[-1:] == choose(logits[-1:], rows[-1], sampling=triton_sampling())


@given(requested=st.lists(REQUESTED, min_size=1, max_size=4), seed=st.integers(0, 2**20))
@settings(max_examples=num_examples(10))
def test_triton_constrains_to_the_bits_of_torch(requested: list[dict[str, Any]], seed: int) -> None:
    logits = random_logits(2 * len(requested), VOCAB_SIZE, seed=seed)
    rows = [row((1, 3, 3, 5, 7), num_prompt=2, **each) for each in requested]
    rows += [allow_only(each, (3, 7, 9, 40), VOCAB_SIZE) for each in rows]

    found = constrained_logits(triton_sampling(), logits, *rows)

    assert torch.equal(found, constrained_logits(TORCH_SAMPLING, logits, *rows))


def test_triton_counts_a_long_history_and_applies_many_biases() -> None:
    known = torch.randint(0, 3000, (5000,), generator=torch.Generator().manual_seed(1)).tolist()
    biases = {token_id: token_id / 100 for token_id in range(0, 3000, 2)}
    penalties: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.1,
    }
    rows = [
        row(known, num_prompt=2500, **penalties, logit_bias=biases, allowed_token_ids=known[:900]),
        row(known[:70], num_prompt=69, frequency_penalty=1.0),
        row(),
    ]
    logits = random_logits(len(rows), 3000)

    found = constrained_logits(triton_sampling(), logits, *rows)

    assert torch.equal(found, constrained_logits(TORCH_SAMPLING, logits, *rows))


# --- what a request forbids, favours and penalises -----------------------------------------


def test_allowed_and_banned_tokens_mask_only_the_excluded_tokens() -> None:
    logits = random_logits(VOCAB_SIZE)

    allowed = draw_many(logits, 500, allowed_token_ids=(3, 9, 11), banned_token_ids=(9,))

    assert set(allowed) == {3, 11}


def test_a_request_that_allows_no_token_fails_alone(sampling: SamplingBackend) -> None:
    logits = random_logits(2, VOCAB_SIZE)
    nothing = row(allowed_token_ids=(4,), banned_token_ids=(4,))

    choices = choose(logits, nothing, row(temperature=0.0), sampling=sampling)

    assert choices == [
        Failure(ALL_TOKENS_FORBIDDEN, FailureCause.REQUEST),
        int(logits[1].argmax()),
    ]


def test_logit_bias_is_added(sampling: SamplingBackend) -> None:
    logits = random_logits(1, VOCAB_SIZE)

    constrained = constrained_logits(sampling, logits, row(logit_bias={4: 2.5, 6: -3.0}))

    expected = logits.clone()
    expected[0, 4] += 2.5
    expected[0, 6] -= 3.0
    assert torch.equal(constrained, expected)


@pytest.mark.parametrize(
    ("num_outputs", "ignore_eos", "masked"),
    [(0, False, {7, 8, 20}), (2, False, {7, 8, 20}), (3, False, set()), (0, True, {20})],
)
def test_end_tokens_are_masked_until_min_tokens(
    sampling: SamplingBackend, num_outputs: int, ignore_eos: bool, masked: set[int]
) -> None:
    requested = row(
        [1] * (2 + num_outputs),
        num_prompt=2,
        min_tokens=3,
        stop_token_ids=(20,),
        ignore_eos=ignore_eos,
    )

    constrained = constrained_logits(sampling, random_logits(1, VOCAB_SIZE), requested)

    assert set(constrained[0].isneginf().nonzero().flatten().tolist()) == masked


@given(
    tokens=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30),
    penalty=st.sampled_from([0.5, 1.1, 2.0]),
)
@settings(max_examples=num_examples(60))
def test_the_repetition_penalty_equals_that_of_transformers(
    sampling_at_length: SamplingBackend, tokens: list[int], penalty: float
) -> None:
    logits = random_logits(1, VOCAB_SIZE, seed=len(tokens))
    theirs = generation.RepetitionPenaltyLogitsProcessor(penalty)

    constrained = constrained_logits(
        sampling_at_length, logits, row(tokens, num_prompt=1, repetition_penalty=penalty)
    )

    assert torch.equal(constrained, theirs(torch.tensor([tokens]), logits.clone()))


@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    num_prompt=st.integers(0, 30),
    presence=st.sampled_from([-1.0, 0.0, 0.5]),
    frequency=st.sampled_from([-0.5, 0.0, 0.25]),
)
@settings(max_examples=num_examples(60))
def test_presence_and_frequency_penalties_count_output_tokens_only(
    sampling_at_length: SamplingBackend,
    tokens: list[int],
    num_prompt: int,
    presence: float,
    frequency: float,
) -> None:
    logits = random_logits(1, VOCAB_SIZE)
    num_prompt = min(num_prompt, len(tokens))
    requested = row(
        tokens, num_prompt=num_prompt, presence_penalty=presence, frequency_penalty=frequency
    )

    constrained = constrained_logits(sampling_at_length, logits, requested)

    expected = logits.clone()
    for token_id, count in Counter(tokens[num_prompt:]).items():
        expected[0, token_id] -= presence + frequency * count
    torch.testing.assert_close(constrained, expected)


# --- broken logits ---------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_non_finite_row_is_an_error_and_the_other_rows_are_not(
    sampling: SamplingBackend, poison: float, temperature: float
) -> None:
    logits = random_logits(3, VOCAB_SIZE)
    rows = [row(temperature=temperature, seed=i) for i in range(3)]
    sound = choose(logits, *rows, sampling=sampling)
    logits[1, 13] = poison

    choices = choose(logits, *rows, sampling=sampling)

    assert choices == [sound[0], Failure(NOT_FINITE), sound[2]]


def test_a_batch_of_non_finite_rows_yields_only_errors(sampling: SamplingBackend) -> None:
    logits = torch.full((2, VOCAB_SIZE), math.nan)

    choices = choose(logits, row(), row(temperature=0.0), sampling=sampling)

    assert choices == [Failure(NOT_FINITE)] * 2


# --- logprobs --------------------------------------------------------------------------------


def token_logprobs(
    sampling: SamplingBackend, logits: Tensor, token_ids: Sequence[int], num_tops: Sequence[int]
) -> list[TokenLogprobs]:
    computed = sampling.compute_logprobs(logits, torch.tensor(token_ids), max(num_tops))
    return read_logprobs([tensor.numpy() for tensor in computed], num_tops)


def test_logprobs_ranks_and_top_tokens_are_computed_by_row(sampling: SamplingBackend) -> None:
    logits = random_logits(2, VOCAB_SIZE)
    least = int(logits[1].argmin())

    first, second = token_logprobs(sampling, logits, [int(logits[0].argmax()), least], [0, 3])

    assert (first.rank, first.top) == (1, ())
    assert second.rank == VOCAB_SIZE
    assert second.logprob == pytest.approx(float(logits[1].log_softmax(0)[least]))
    assert [token for token, _ in second.top] == logits[1].topk(3).indices.tolist()


def test_equal_logprobs_share_the_better_rank(sampling: SamplingBackend) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])

    ranks = [token_logprobs(sampling, logits, [t], [0])[0].rank for t in range(4)]

    assert ranks == [3, 1, 1, 4]


def test_logprobs_of_a_vocabulary_in_pieces_equal_float64(sampling: SamplingBackend) -> None:
    logits = random_logits(3, 5003, spread=8.0)
    logits[1] -= 1e4
    logits[2, 7] = 1e4

    computed = sampling.compute_logprobs(logits, torch.tensor([5002, 1, 7]), MAX_LOGPROBS)

    wanted = logits.double().log_softmax(dim=-1)
    of_tops, tops = wanted.gather(1, computed.top_token_ids), wanted.topk(MAX_LOGPROBS)
    assert torch.allclose(computed.top_logprobs.double(), of_tops, rtol=1e-6, atol=1e-5)
    assert torch.allclose(of_tops, tops.values, rtol=1e-6, atol=1e-5)
    own = wanted[[0, 1, 2], [5002, 1, 7]]
    assert torch.allclose(computed.logprobs.double(), own, rtol=1e-6, atol=1e-5)
    assert computed.ranks.tolist() == (1 + (wanted > own[:, None]).sum(dim=1)).tolist()


def test_logprobs_of_some_rows_are_those_of_all(sampling: SamplingBackend) -> None:
    logits, chosen = random_logits(5, VOCAB_SIZE), torch.arange(5)
    rows = torch.tensor([1, 4])

    computed = sampling.compute_logprobs(logits, chosen, 3, rows)

    every = sampling.compute_logprobs(logits, chosen, 3)
    assert all(torch.equal(one, all_[rows]) for one, all_ in zip(computed, every, strict=True))


def test_equal_top_tokens_are_listed_by_id_and_a_row_has_the_same_bits_alone() -> None:
    logits = random_logits(6, 70)
    logits[:, 20:] = logits[:, 20:].round()  # many are equal
    chosen, own = torch.arange(6), triton_sampling()

    together = own.compute_logprobs(logits, chosen, 40)

    by_rank = together.top_logprobs.tolist()
    ordered = [
        sorted(range(40), key=lambda at: (-values[at], ids[at]))
        for values, ids in zip(by_rank, together.top_token_ids.tolist(), strict=True)
    ]
    assert ordered == [list(range(40))] * 6
    for row_id in range(6):
        part = slice(row_id, row_id + 1)
        alone = own.compute_logprobs(logits[part], chosen[part], 40)
        assert all(torch.equal(one, all_[part]) for one, all_ in zip(alone, together, strict=True))


@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    sequences=st.lists(
        st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5
    ),
)
@settings(max_examples=num_examples(200))
def test_banned_sequences_equal_the_bad_words_of_transformers(
    sampling_at_length: SamplingBackend, tokens: list[int], sequences: list[tuple[int, ...]]
) -> None:
    logits = random_logits(1, VOCAB_SIZE, seed=len(tokens))
    theirs = generation.NoBadWordsLogitsProcessor([list(one) for one in sequences])

    constrained = constrained_logits(
        sampling_at_length, logits, row(tokens, num_prompt=1, banned_sequences=tuple(sequences))
    )

    assert torch.equal(constrained, theirs(torch.tensor([tokens]), logits.clone()))


@given(num_outputs=st.integers(0, 6), min_tokens=st.integers(0, 6))
@settings(max_examples=num_examples(40))
def test_min_tokens_equal_the_min_new_tokens_of_transformers(
    sampling_at_length: SamplingBackend, num_outputs: int, min_tokens: int
) -> None:
    logits = random_logits(1, VOCAB_SIZE)
    tokens = [1] * (3 + num_outputs)
    theirs = generation.MinNewTokensLengthLogitsProcessor(3, min_tokens, list(EOS))

    constrained = constrained_logits(
        sampling_at_length, logits, row(tokens, num_prompt=3, min_tokens=min_tokens)
    )

    assert torch.equal(constrained, theirs(torch.tensor([tokens]), logits.clone()))


def test_logit_bias_equals_the_sequence_bias_of_transformers(sampling: SamplingBackend) -> None:
    logits = random_logits(1, VOCAB_SIZE)
    bias = {4: 2.5, 6: -3.0, 9: 100.0}
    theirs = generation.SequenceBiasLogitsProcessor([[[token], by] for token, by in bias.items()])

    constrained = constrained_logits(sampling, logits, row(logit_bias=bias))

    assert torch.equal(constrained, theirs(torch.tensor([[1, 2, 3]]), logits.clone()))


@pytest.mark.parametrize("vocab_size", [17, 32, 50, 1000, 4099])
def test_grammars_forbid_the_tokens_whose_bit_is_not_set(vocab_size: int) -> None:
    random_bits = np.random.default_rng(0).integers(0, 2, (3, num_words(vocab_size) * 32))
    random_bits[1, :64] = 0
    masks = np.packbits(random_bits.astype(np.bool_), axis=1, bitorder="little").view(np.int32)
    rows = [row()._replace(allowed=mask) for mask in masks]
    logits = random_logits(4, vocab_size)

    for backend in (TORCH_SAMPLING, *native_samplings()):
        found = constrained_logits(backend, logits, rows[0], row(), *rows[1:])

        assert torch.equal(found[1], logits[1])
        for masked, index in enumerate((0, 2, 3)):
            is_allowed = torch.from_numpy(random_bits[masked, :vocab_size]).bool()
            assert torch.equal(found[index], logits[index].masked_fill(~is_allowed, -math.inf))


def test_without_a_grammar_min_tokens_always_applies(sampling: SamplingBackend) -> None:
    requested = row(allowed_token_ids=EOS, min_tokens=2, max_tokens=4)

    assert choose(random_logits(1, VOCAB_SIZE), requested, sampling=sampling) == [
        Failure(ALL_TOKENS_FORBIDDEN, FailureCause.REQUEST)
    ]


def test_with_a_grammar_min_tokens_is_ignored_if_only_an_end_token_is_allowed(
    sampling: SamplingBackend,
) -> None:
    requested = allow_only(row(min_tokens=2, max_tokens=4), EOS[:1], VOCAB_SIZE)

    assert choose(random_logits(1, VOCAB_SIZE), requested, sampling=sampling) == [EOS[0]]


PROCESSED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with a penalty": {"temperature": 0.0, "frequency_penalty": 1.5},
    "a temperature": {"temperature": 0.5},
    "min_p": {"temperature": 2.0, "min_p": 0.3},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "all": {"temperature": 0.8, "min_p": 0.05, "top_k": 9, "top_p": 0.7, "presence_penalty": 1.0},
    "allowed tokens": {"temperature": 1.0, "allowed_token_ids": (4, 9, 11)},
}


def expected_distribution(
    logits: Tensor, known: Sequence[int], requested: dict[str, Any]
) -> Tensor:
    """Return logprobs by the logits processors of transformers, in vLLM's order."""
    scores = logits.clone()
    counts = Counter(known[3:])
    for token_id, count in counts.items():
        scores[token_id] -= requested.get("frequency_penalty", 0.0) * count
        scores[token_id] -= requested.get("presence_penalty", 0.0)
    allowed = requested.get("allowed_token_ids")
    if allowed is not None:
        scores[[id_ for id_ in range(VOCAB_SIZE) if id_ not in allowed]] = -math.inf
    temperature = requested["temperature"]
    filters: list[Any] = []
    if temperature:
        filters.append(generation.TemperatureLogitsWarper(temperature))
        if "min_p" in requested:
            filters.append(generation.MinPLogitsWarper(requested["min_p"]))
        if "top_k" in requested:
            filters.append(generation.TopKLogitsWarper(requested["top_k"]))
        if "top_p" in requested:
            filters.append(generation.TopPLogitsWarper(requested["top_p"]))
    batch = scores[None]
    for each in filters:
        batch = each(torch.tensor([known]), batch)
    return batch.log_softmax(dim=-1)[0]


def test_processed_logprobs_are_those_of_what_is_drawn_from(sampling: SamplingBackend) -> None:
    sampler = Sampler(EOS, sampling=sampling, logprobs_mode=PROCESSED_LOGPROBS)
    known = (1, 2, 3, 9, 9, 4)
    rows = [
        row(known, num_prompt=3, seed=seed, logprobs=4 if name != "top_k" else VOCAB_SIZE, **each)
        for seed, (name, each) in enumerate(PROCESSED.items())
    ]
    rows.append(row(known, num_prompt=3, temperature=0.7))  # without logprobs
    logits = random_logits(len(rows), VOCAB_SIZE, seed=5)

    samples = sample(sampler, logits, rows)

    plain = sample(Sampler(EOS, sampling=sampling), logits, rows)
    assert samples.choices == plain.choices
    assert [*samples.logprobs] == [*range(len(PROCESSED))]
    for index, requested in enumerate(PROCESSED.values()):
        expected = expected_distribution(logits[index], known, requested)
        found = samples.logprobs[index]
        assert found.token_id == samples.choices[index]
        assert found.logprob == pytest.approx(float(expected[found.token_id]), abs=1e-5)
        best = expected.sort(descending=True).values.tolist()[: len(found.top)]
        assert [logprob for _, logprob in found.top] == pytest.approx(best, abs=1e-5)
    raw = logits[0].log_softmax(dim=-1)
    assert plain.logprobs[2].logprob != samples.logprobs[2].logprob
    assert samples.logprobs[0].top[0][1] == pytest.approx(float(raw.max()), abs=1e-5)
