"""Roofline model: lower bounds on the duration of a model's step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.checkpoint.gguf.gguf_checkpoint import GgufCheckpoint
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.model.config import LayerConfig, MoeConfig
from baton.engine.runner.model.linear import Router
from baton.engine.runner.model.ops import Ops
from baton.engine.runner.weights.decoder_weights import expected_tensors
from benchmarks.engine.roofline import (
    LayerWork,
    StepWork,
    Work,
    batch_of,
    expect_experts,
    prompt_of,
    work_of,
)
from benchmarks.engine.routing import RoutingMeter
from tests.support.families import FAMILY_VARIANTS, RECURRENT
from tests.support.gguf_files import write_gguf
from tests.support.models import VARIANTS, make_model_folder
from tests.support.random_folders import small_config, small_folder
from tools.make_model import make_model

DELTA_FAMILIES = ("qwen3-next", "qwen3.5", "olmo-hybrid", "kimi-linear")
DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"

LAYER = LayerWork(LayerConfig(), kv_numbers=40, other_numbers=60, expert_numbers=0, top_k=0)
WORK = Work(
    layers=[LAYER],
    moe=None,
    head_numbers=50,
    number_bytes=2,
    expert_number_bytes=2,
    head_number_bytes=2,
    slot_numbers=10,
    pair_products=5,
)
TINY = {
    "vocab_size": 10,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
}


def no_experts(_num_tokens: int) -> float:
    return 0.0


def read_bytes(work: Work, step: StepWork, num_experts: float = 0.0) -> float:
    return work.seconds(step, lambda _: num_experts, bytes_per_s=1.0, flops_per_s=1e30)


def flops(work: Work, step: StepWork) -> float:
    return work.seconds(step, no_experts, bytes_per_s=1e30, flops_per_s=1.0)


def test_small_batches_are_memory_bound_and_large_batches_are_compute_bound() -> None:
    limits = {"bytes_per_s": 320.0, "flops_per_s": 610.0}

    assert WORK.seconds(batch_of(1, 1), no_experts, **limits) == (300 + 20) / 320
    assert WORK.seconds(batch_of(8, 1), no_experts, **limits) == 8 * 2 * (150 + 5) / 610


def test_a_batch_reads_the_kv_of_all_of_its_sequences() -> None:
    assert read_bytes(WORK, batch_of(2, 15)) == 2 * 150 + 2 * 15 * 20


def test_a_prompt_reads_its_kv_slots_once_and_attention_is_causal() -> None:
    work = replace(WORK, layers=[LAYER, LAYER])

    assert read_bytes(work, prompt_of(3)) == 2 * 250 + 2 * 3 * 20
    # The last layer computes queries, attention and MLP of the last token alone.
    assert flops(work, prompt_of(3)) == 2 * (50 + 3 * 100 + 3 * 40 + 60 + (1 + 2 + 3 + 3) * 5)


def test_sliding_windows_and_chunks_reduce_the_kv_slots_that_are_read() -> None:
    window = replace(LAYER, span=LayerConfig(window=4))
    chunk = replace(LAYER, span=LayerConfig(chunk=4))
    work = replace(WORK, layers=[window, chunk], slot_numbers=1, pair_products=1)

    # At position 9, the window has slots 6 to 9 and the chunk 8 and 9.
    assert read_bytes(work, batch_of(1, 10)) == 2 * 250 + (4 + 2) * 2
    # Six tokens: 1, 2, 3, 4, 4, 4 slots of the window. The last one sees 4 and 5 of its chunk.
    assert read_bytes(work, prompt_of(6)) == 2 * 250 + (6 + 2) * 2
    assert flops(work, prompt_of(6)) == 2 * (50 + 6 * 100 + 6 * 40 + 60 + 18 + 2)


def test_an_moe_model_reads_the_chosen_experts_and_computes_those_of_each_token(
    tmp_path: Path,
) -> None:
    work = work_of(
        SafetensorsFolder(small_folder(tmp_path, "qwen3-30b-a3b", "bfloat16", **TINY)), "none"
    )
    attention = 64 + 128  # keys and values, queries and output
    router, expert, head = 4 * 8, 3 * 6 * 8, 10 * 8

    read = head + 2 * (attention + router + 3 * expert)
    assert read_bytes(work, batch_of(5, 1), 3.0) == 2 * read + 2 * 5 * 8 * 2
    products = head + 2 * (attention + router + 2 * expert + 16)
    assert flops(work, batch_of(5, 1)) == 2 * 5 * products


def test_uniform_routing_reads_nearly_all_experts_in_a_large_batch() -> None:
    expect = expect_experts(MoeConfig(num_experts=4, top_k=2, expert_size=1))

    assert [expect(count) for count in (0, 1, 2, 3)] == [0.0, 2.0, 3.0, 3.5]


def test_only_chosen_experts_count_as_read() -> None:
    moe = MoeConfig(num_experts=3, top_k=1, expert_size=1)
    router = Router(moe, torch.eye(3), None, None)
    meter = RoutingMeter(lambda _: 7.0)
    route = Ops.route

    with meter.count():
        Ops().route(torch.eye(3)[[0, 0, 2]], router)
        Ops().route(torch.eye(3)[[1, 1, 1]], router)
    Ops().route(torch.eye(3), router)

    assert meter.num_experts(3) == (2 + 1) / 2
    assert meter.num_experts(4) == 7.0
    assert Ops.route is route


def test_the_state_traffic_of_a_recurrent_layer_is_independent_of_the_context() -> None:
    layer = LayerWork(LayerConfig(is_recurrent=True), 0, 100, 0, 0, state_numbers=30)
    work = replace(WORK, layers=[layer])
    stateless = replace(WORK, layers=[replace(layer, state_numbers=0)])

    for step in (batch_of(3, 5), batch_of(3, 500)):
        assert read_bytes(work, step) - read_bytes(stateless, step) == 2 * 3 * 30 * 4
        assert flops(work, step) - flops(stateless, step) == 2 * 3 * 3 * 30


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("name", [*FAMILY_VARIANTS, "falcon-h1", "olmo-hybrid", "kimi-linear"])
def test_each_matrix_of_a_family_counts_once(name: str, tmp_path: Path) -> None:
    variant = {**FAMILY_VARIANTS, **RECURRENT}[name]
    config = read_model_config(SafetensorsFolder(make_model_folder(tmp_path, variant)))
    work = work_of(SafetensorsFolder(tmp_path), "none")

    num_experts = 0 if config.moe is None else config.moe.num_experts
    counted = config.vocab_size * config.hidden_size + sum(
        layer.kv_numbers
        + layer.other_numbers
        + layer.unquantized_numbers
        + num_experts * layer.expert_numbers
        for layer in work.layers
    )
    matrices = {
        name: torch.Size(shape).numel()
        for name, shape in expected_tensors(config).items()
        if len(shape) > 1 and "embed_tokens" not in name and not name.endswith(("_bias", "A_log"))
    }
    head = config.vocab_size * config.hidden_size if config.ties_embeddings else 0
    assert counted == sum(matrices.values()) + head
    products = {layer.state_products for layer in work.layers if layer.state_numbers}
    expected = {"granite-4-moe": {2}, "falcon-h1": {2}}
    expected |= {key: {3} for key in DELTA_FAMILIES}
    assert products == expected.get(name, set())


def test_latent_attention_reads_one_latent_and_one_key_per_slot(tmp_path: Path) -> None:
    small_folder(tmp_path, "deepseek-v2-lite")
    heads, rank, rotated = 4, 32, 8

    work, quantized = (
        work_of(SafetensorsFolder(tmp_path), "none"),
        work_of(SafetensorsFolder(tmp_path), "int8"),
    )

    assert work.slot_numbers == rank + rotated
    assert work.pair_products == heads * (rank + rotated + rank)
    layer = replace(work.layers[0], kv_numbers=0, other_numbers=0)
    absorbed = heads * (16 + 16) * rank
    assert layer.unquantized_numbers == absorbed
    alone = replace(quantized, layers=[layer], head_numbers=0)
    assert read_bytes(alone, batch_of(1, 0)) == 2 * absorbed


def test_a_quantized_folder_is_read_as_it_is_stored(tmp_path: Path) -> None:
    make_model(tmp_path, small_config("gpt-oss-20b"), quantization="mxfp4")

    work = work_of(SafetensorsFolder(tmp_path), "none")

    assert (work.number_bytes, work.expert_number_bytes, work.head_number_bytes) == (2.0, 0.5, 2.0)


def test_integer_weights_are_read_faster() -> None:
    alone = batch_of(1, 0)
    plain, int8, int4 = (
        work_of(SafetensorsFolder(DEMO), quantize) for quantize in ("none", "int8", "int4")
    )

    assert read_bytes(int8, alone) == read_bytes(plain, alone) / 2
    # The head has six bits.
    in_layers = read_bytes(int8, alone) - plain.head_numbers
    assert read_bytes(int4, alone) == pytest.approx(in_layers * 0.6 + plain.head_numbers * 0.75)


def test_the_parameter_count_of_the_demo_model_equals_that_of_its_files() -> None:
    stored = (DEMO / "model.safetensors").stat().st_size

    assert read_bytes(work_of(SafetensorsFolder(DEMO), "none"), batch_of(1, 0)) == pytest.approx(
        stored, rel=0.01
    )


def test_the_matrices_of_a_gguf_file_have_their_own_bits(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "folder", VARIANTS["llama"])
    work = work_of(GgufCheckpoint(write_gguf(folder, tmp_path / "q4.gguf", "Q4_0").path), "none")

    assert (work.number_bytes, work.head_number_bytes) == (0.5, 0.5)
