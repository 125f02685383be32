"""Mixtures of experts by family: tensor names and config fields."""

from __future__ import annotations

from dataclasses import replace

from baton.checkpoint.json_fields import JsonFields
from baton.engine.runner.families.family import ExpertNames
from baton.engine.runner.families.rope_fields import find_rope_fields
from baton.engine.runner.model.config import MoeConfig, QueryTemperature, Scoring

QWEN_EXPERTS = ExpertNames(
    router="mlp.gate",
    gate_up=("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    down="mlp.experts.{expert}.down_proj",
)
UNCORRECTED_SHARED_EXPERTS = replace(QWEN_EXPERTS, shared="mlp.shared_experts")
SHARED_EXPERTS = replace(
    UNCORRECTED_SHARED_EXPERTS, correction_bias="mlp.gate.e_score_correction_bias"
)
ERNIE_EXPERTS = replace(
    UNCORRECTED_SHARED_EXPERTS,
    correction_bias="mlp.moe_statics.e_score_correction_bias",
    has_correction_row=True,
)
SHARED_GATED_EXPERTS = replace(
    QWEN_EXPERTS, shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"
)
MIXTRAL_EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    gate_up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    down="block_sparse_moe.experts.{expert}.w2",
)
MINIMAX_EXPERTS = replace(
    MIXTRAL_EXPERTS, correction_bias="block_sparse_moe.e_score_correction_bias"
)
KIMI_EXPERTS = replace(
    MIXTRAL_EXPERTS,
    correction_bias="block_sparse_moe.gate.e_score_correction_bias",
    shared="block_sparse_moe.shared_experts",
)
LFM2_EXPERTS = ExpertNames(
    router="feed_forward.gate",
    gate_up=("feed_forward.experts.{expert}.w1", "feed_forward.experts.{expert}.w3"),
    down="feed_forward.experts.{expert}.w2",
    correction_bias="feed_forward.expert_bias",
)
GRANITE_EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer",
    gate_up=("block_sparse_moe.input_linear",),
    down="block_sparse_moe.output_linear",
)
GRANITE_SHARED_EXPERTS = replace(
    GRANITE_EXPERTS,
    shared="shared_mlp",
    shared_gate_up=("input_linear",),
    shared_down="output_linear",
)
OPENAI_EXPERTS = ExpertNames(
    router="mlp.router",
    gate_up=("mlp.experts.gate_up_proj",),
    down="mlp.experts.down_proj",
    is_transposed=True,
    is_interleaved=True,
    has_weight_suffix=False,
    others=(replace(QWEN_EXPERTS, router="mlp.router"),),
)
GEMMA4_EXPERTS = ExpertNames(
    router="router.proj",
    gate_up=("experts.gate_up_proj",),
    down="experts.down_proj",
    has_weight_suffix=False,
)
LLAMA4_EXPERTS = ExpertNames(
    router="feed_forward.router",
    gate_up=("feed_forward.experts.gate_up_proj",),
    down="feed_forward.experts.down_proj",
    shared="feed_forward.shared_expert",
    is_transposed=True,
    has_weight_suffix=False,
    others=(
        ExpertNames(
            router="feed_forward.router",
            gate_up=(
                "feed_forward.experts.{expert}.gate_proj",
                "feed_forward.experts.{expert}.up_proj",
            ),
            down="feed_forward.experts.{expert}.down_proj",
            shared="feed_forward.shared_expert",
        ),
    ),
)
_QWEN_STACKED = replace(
    QWEN_EXPERTS,
    gate_up=("mlp.experts.gate_up_proj",),
    down="mlp.experts.down_proj",
    has_weight_suffix=False,
)
# Published folders are transposed. transformers 5 loads them and writes them not transposed.
QWEN3_VL_EXPERTS = replace(_QWEN_STACKED, is_transposed=True, others=(_QWEN_STACKED, QWEN_EXPERTS))
QWEN3_5_EXPERTS = replace(
    _QWEN_STACKED,
    shared=SHARED_GATED_EXPERTS.shared,
    shared_gate=SHARED_GATED_EXPERTS.shared_gate,
    others=(SHARED_GATED_EXPERTS,),
)
# Sums of chosen weights are above, so that it has no effect.
MAX_NORM_MIN = 1e-9


def qwen3_moe(raw: JsonFields) -> MoeConfig:
    moe = _read(raw, "num_experts", "moe_intermediate_size")
    return replace(moe, normalizes=raw.flag("norm_topk_prob", False))


def qwen3_vl_moe(raw: JsonFields) -> MoeConfig:
    return replace(qwen3_moe(raw), normalizes=True)


def qwen2_moe(raw: JsonFields) -> MoeConfig:
    shared_size = raw.positive_int("shared_expert_intermediate_size")
    return replace(qwen3_moe(raw), shared_size=shared_size, has_shared_gate=True)


def qwen3_5_moe(raw: JsonFields) -> MoeConfig:
    return replace(qwen2_moe(raw), normalizes=True)


def mixtral_moe(raw: JsonFields) -> MoeConfig:
    return replace(_read(raw, "num_local_experts", "intermediate_size", 2), normalizes=True)


def minimax_moe(raw: JsonFields) -> MoeConfig:
    _check_method(raw, "scoring_func", "sigmoid")
    moe = _read(raw, "num_local_experts", "intermediate_size")
    return replace(moe, scoring=Scoring.SIGMOID, normalizes=True, has_correction_bias=True)


def lfm2_moe(raw: JsonFields) -> MoeConfig:
    """Read a mixture. transformers adds 1e-6 to the sum of the weights, which is about one."""
    return replace(
        _read(raw, "num_experts", "moe_intermediate_size"),
        scoring=Scoring.SIGMOID,
        normalizes=raw.flag("norm_topk_prob", True),
        scale=raw.number("routed_scaling_factor", 1.0),
        has_correction_bias=True,
    )


def olmoe_moe(raw: JsonFields) -> MoeConfig:
    moe = _read(raw, "num_experts", "intermediate_size", 8)
    return replace(moe, normalizes=raw.flag("norm_topk_prob", False))


def gemma4_moe(raw: JsonFields) -> MoeConfig:
    moe = _read(raw, "num_experts", "moe_intermediate_size", raw.positive_int("top_k_experts"))
    return replace(moe, normalizes=True)


def granite_moe(raw: JsonFields) -> MoeConfig:
    moe = _read(raw, "num_local_experts", "intermediate_size", 2)
    return replace(moe, scoring=Scoring.SOFTMAX_OF_TOP)


def granite_shared_moe(raw: JsonFields) -> MoeConfig:
    return replace(granite_moe(raw), shared_size=raw.positive_int("shared_intermediate_size"))


def gpt_oss_moe(raw: JsonFields) -> MoeConfig:
    moe = _read(raw, "num_local_experts", "intermediate_size", 4)
    return replace(moe, scoring=Scoring.SOFTMAX_OF_TOP, has_bias=True)


def glm4_moe(raw: JsonFields) -> MoeConfig:
    moe = _read(raw, "n_routed_experts", "moe_intermediate_size")
    return replace(
        moe,
        scoring=Scoring.SIGMOID,
        normalizes=raw.flag("norm_topk_prob", True),
        scale=raw.number("routed_scaling_factor", 1.0),
        num_groups=raw.positive_int("n_group", 1),
        top_groups=raw.positive_int("topk_group", 1),
        has_correction_bias=True,
        shared_size=moe.expert_size * raw.positive_int("n_shared_experts", 1),
    )


def deepseek_v3_moe(raw: JsonFields) -> MoeConfig:
    _check_method(raw, "scoring_func", "sigmoid")
    _check_method(raw, "topk_method", "noaux_tc")
    return glm4_moe(raw)


def deepseek_v2_moe(raw: JsonFields) -> MoeConfig:
    _check_method(raw, "scoring_func", "softmax")
    _check_method(raw, "topk_method", "greedy", "group_limited_greedy")
    if raw.flag("norm_topk_prob", False):
        raise raw.wrong("norm_topk_prob", "must be false")
    has_groups = raw.get("topk_method") == "group_limited_greedy"
    moe = _read(raw, "n_routed_experts", "moe_intermediate_size")
    return replace(
        moe,
        scale=raw.number("routed_scaling_factor", 1.0),
        num_groups=raw.positive_int("n_group") if has_groups else 1,
        top_groups=raw.positive_int("topk_group") if has_groups else 1,
        group_best=1,
        shared_size=moe.expert_size * raw.positive_int("n_shared_experts"),
    )


def ernie_moe(raw: JsonFields) -> MoeConfig:
    if raw.number("moe_norm_min", MAX_NORM_MIN) > MAX_NORM_MIN:
        raise raw.wrong("moe_norm_min", f"must be at most {MAX_NORM_MIN:g}")
    size = raw.positive_int("moe_intermediate_size")
    return MoeConfig(
        num_experts=raw.positive_int("moe_num_experts"),
        top_k=raw.positive_int("moe_k"),
        expert_size=size,
        normalizes=True,
        has_correction_bias=True,
        shared_size=size * int(raw.number("moe_num_shared_experts", above=-1)),
    )


def llama4_moe(raw: JsonFields) -> MoeConfig:
    moe = _read(raw, "num_local_experts", "intermediate_size")
    return replace(moe, scoring=Scoring.SIGMOID, scales_input=True, shared_size=moe.expert_size)


def llama4_temperature(raw: JsonFields) -> QueryTemperature | None:
    # Early configurations have a number here.
    if raw.has("attn_temperature_tuning") and not raw.get("attn_temperature_tuning"):
        return None
    gain, period = raw.number("attn_scale", 0.1), raw.number("floor_scale", 8192, above=0)
    return QueryTemperature(period, gain, offset=1.0)


def ministral_temperature(raw: JsonFields) -> QueryTemperature | None:
    rope = find_rope_fields(raw)
    if rope is None or not rope.has("llama_4_scaling_beta"):
        return None
    period = rope.number("original_max_position_embeddings", above=0)
    return QueryTemperature(period, rope.number("llama_4_scaling_beta"))


def _read(raw: JsonFields, count: str, size: str, top_k: int | None = None) -> MoeConfig:
    """Read what all mixtures have, from the fields with these names.

    Some versions of transformers write the number of experts with another name.
    """
    names = {"num_local_experts", "num_experts", "n_routed_experts"} - {count}
    return MoeConfig(
        num_experts=raw.positive_int(next(filter(raw.has, sorted(names)), count)),
        top_k=raw.positive_int("num_experts_per_tok", top_k),
        expert_size=raw.positive_int(size),
    )


def _check_method(raw: JsonFields, name: str, *known: str) -> None:
    if raw.has(name) and raw.get(name) not in known:
        raise raw.wrong(name, f"must be {' or '.join(known)}")


def check_moe(moe: MoeConfig, fields: JsonFields) -> None:
    """Check the numbers of experts and groups. Raises ModelError."""
    size, rest = divmod(moe.num_experts, moe.num_groups)
    if rest or size < min(moe.num_groups, 2):
        expected = f"must divide the {moe.num_experts} experts into groups of at least 2"
        raise fields.wrong("n_group", expected)
    if moe.top_groups > moe.num_groups:
        raise fields.wrong("topk_group", f"must be at most n_group ({moe.num_groups})")
    num_open = size * moe.top_groups
    if moe.top_k > num_open:
        raise fields.wrong("num_experts_per_tok", f"must be at most {num_open}")
