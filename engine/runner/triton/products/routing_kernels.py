"""Triton kernel of routing: chooses the experts of a token, and computes their weights."""

# Triton reads the annotations, which must not be strings.

import triton
import triton.language as tl

NONE = tl.constexpr(1 << 30)  # greater than every expert id


@triton.jit
def total(numbers):
    return tl.sum(tl.sum(numbers, axis=1), axis=0)


@triton.jit
def highest(numbers):
    return tl.max(tl.max(numbers, axis=1), axis=0)


@triton.jit
def softmax(numbers, largest, is_inside):
    """Return exp(numbers - largest), which is not yet divided by the sum."""
    return tl.where(is_inside, tl.exp(numbers - largest), 0.0)


@triton.jit
def find_scores(logits, is_expert, scoring: tl.constexpr):
    """Return the scores of experts, [groups, experts of a group]."""
    if scoring == "softmax":
        weights = softmax(logits, highest(logits), is_expert)
        scores = tl.div_rn(weights, total(weights))
    elif scoring == "sigmoid":
        scores = tl.sigmoid(logits)
    else:
        scores = logits
    return scores


@triton.jit
def hide_other_groups(choice, groups, experts, top_groups, group_best):
    """Set the scores outside the best groups to -inf. A group counts by its best experts."""
    rest = choice
    group_scores = tl.zeros((choice.shape[0],), tl.float32)
    for _ in range(group_best):
        best = tl.max(rest, axis=1)
        group_scores += best
        first = tl.min(tl.where(rest == best[:, None], experts, NONE), axis=1)
        rest = tl.where(experts == first[:, None], float("-inf"), rest)
    is_open = groups < 0
    for _ in range(top_groups):
        closed_scores = tl.where(is_open, float("-inf"), group_scores)
        best_group = tl.max(closed_scores, axis=0)
        first_group = tl.min(tl.where(closed_scores == best_group, groups, NONE), axis=0)
        is_open = is_open | (groups == first_group)
    return tl.where(is_open[:, None], choice, float("-inf"))


@triton.jit
def finish_weights(weights, is_rank, scale, of_top: tl.constexpr, normalizes: tl.constexpr):
    """Return the weights of a token's experts from their scores."""
    if of_top:
        largest = tl.max(tl.where(is_rank, weights, float("-inf")), axis=0)
        weights = softmax(weights, largest, is_rank)
        weights = tl.div_rn(weights, tl.sum(weights, axis=0))
    if normalizes:
        weights = tl.div_rn(weights, tl.sum(tl.where(is_rank, weights, 0.0), axis=0) + 1e-20)
    return weights * scale


@triton.jit
def choose_experts_kernel(
    expert_ids,
    weights,
    logits,
    correction_bias,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    num_groups: tl.constexpr,
    top_groups: tl.constexpr,
    group_best: tl.constexpr,
    scoring: tl.constexpr,
    scale: tl.constexpr,
    normalizes: tl.constexpr,
    has_correction: tl.constexpr,
    padded_groups: tl.constexpr,
    padded_experts: tl.constexpr,
    padded_k: tl.constexpr,
):
    """Choose the experts of a token, best first. Of equal ones, the lowest id comes first."""
    token, group_size = tl.program_id(0).to(tl.int64), num_experts // num_groups
    groups, experts = tl.arange(0, padded_groups), tl.arange(0, padded_experts)[None, :]
    ids = groups[:, None] * group_size + experts
    is_expert = (groups < num_groups)[:, None] & (experts < group_size)
    loaded = tl.load(logits + token * num_experts + ids, mask=is_expert, other=float("-inf"))
    scores = find_scores(loaded, is_expert, scoring)
    choice = scores
    if has_correction:
        choice += tl.load(correction_bias + ids, mask=is_expert, other=0.0)
    choice = tl.where(is_expert, choice, float("-inf"))
    if num_groups > 1:
        choice = hide_other_groups(choice, groups, experts, top_groups, group_best)
    ranks = tl.arange(0, padded_k)
    chosen, found = tl.zeros((padded_k,), tl.int64), tl.zeros((padded_k,), tl.float32)
    for rank in range(top_k):
        is_best = is_expert & (choice == highest(choice))
        first = tl.min(tl.min(tl.where(is_best, ids, NONE), axis=1), axis=0)
        first = tl.minimum(first, num_experts - 1)  # without an order, because of a NaN
        is_first = is_expert & (ids == first)
        chosen = tl.where(ranks == rank, first, chosen)
        found = tl.where(ranks == rank, total(tl.where(is_first, scores, 0.0)), found)
        choice = tl.where(is_first, float("-inf"), choice)
    is_rank = ranks < top_k
    found = finish_weights(found, is_rank, scale, scoring == "softmax of top", normalizes)
    tl.store(expert_ids + token * top_k + ranks, chosen, mask=is_rank)
    tl.store(weights + token * top_k + ranks, found, mask=is_rank)
