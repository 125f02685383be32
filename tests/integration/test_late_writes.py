"""Late KV writes: a write that lands after its request was aborted and its blocks were reused.

P is held between two writes of one push and stopped, its request is aborted on D, and D gets many
requests that need the blocks. Then P resumes. A second pair does the same with a decode node that
releases revoked blocks at once, to show that the late write would otherwise do damage.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from baton.rpc.node_info import NodeLoad
from tests.support.engine_pair import Call, Pair, PairOptions, greedy
from tests.support.models import (
    Variant,
    make_model_folder,
    prompt_of,
    reference_choices,
    reference_greedy,
)
from tests.support.nodes import await_load, is_busy

# One block is 1 MiB, so that a chunk of a prompt is too much for a socket's buffer.
LARGE_KV = {
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 1024,
}
MIB = 1 << 20
LATE = prompt_of(512, seed=1)
NUM_LATE_BLOCKS = 32  # pushed in 8 writes
NUM_PROBE_BLOCKS = 1
NUM_DECODE_BLOCKS = 48
NUM_OTHERS = 6
NUM_TOKENS = 40
NUM_BESIDE_FENCED = 2  # requests that fit next to the late one's blocks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "large-kv"
    return make_model_folder(folder, Variant("Llama", LARGE_KV))


def options(model: Path, kind: str, *, has_fence: bool) -> PairOptions:
    return PairOptions(
        model,
        kind,
        chunk_tokens=512,
        prefill_bytes=40 * MIB,
        decode_bytes=NUM_DECODE_BLOCKS * MIB,
        lease_s=15.0,  # more than a layer takes on a slow machine
        silence_s=5.0,
        write_timeout_s=2.0,
        has_fence=has_fence,
    )


@pytest.mark.parametrize("kind", ["nixl", "nixl tcp"])
def test_every_answer_is_exact_despite_late_writes(large_model: Path, kind: str) -> None:
    with Pair(options(large_model, kind, has_fence=True)) as pair:
        assert pair.d_card.block_bytes == MIB
        late = stop_between_two_writes(pair)
        await_the_cut(pair)
        # Over TCP, that released the blocks. With shared memory, they stay fenced.
        has_all_blocks = kind == "nixl tcp"
        num_fenced = 0 if has_all_blocks else NUM_LATE_BLOCKS + NUM_PROBE_BLOCKS
        await_load(pair.d.address, partial(is_idle_with, NUM_DECODE_BLOCKS - num_fenced))

        others = flood(pair, NUM_OTHERS if has_all_blocks else NUM_BESIDE_FENCED)
        let_the_write_land(pair, late)

        assert [call.to_its_end().token_ids for call in others] == expected_answers(large_model)
        pair.await_all_free()
        after = pair.answer(LATE, greedy(4))
        assert after.token_ids == reference_choices(large_model, LATE, after.token_ids, 4)
        assert after.was_handed_over


@pytest.mark.parametrize("kind", ["nixl", "nixl tcp"])
def test_without_the_fence_the_same_write_corrupts_answers(large_model: Path, kind: str) -> None:
    with Pair(options(large_model, kind, has_fence=False)) as pair:
        late = stop_between_two_writes(pair)

        others = flood(pair, NUM_OTHERS)
        let_the_write_land(pair, late)

        assert [call.to_its_end().token_ids for call in others] != expected_answers(large_model)


def stop_between_two_writes(pair: Pair) -> Call:
    """Stop P during a push whose request was cancelled."""
    late = pair.new_id()
    given_up = pair.decode(late, LATE, greedy())
    pair.await_granted()
    pair.p.hold_before_post(2)
    prefill = pair.prefill(late, LATE, greedy())
    pair.p.await_held()
    pair.p.stop()
    given_up.disconnect()
    return prefill


def await_the_cut(pair: Pair) -> None:
    """Wait until D has cut P off: a request that expects KV from P is computed locally then."""
    probe = pair.decode(pair.new_id(), (5, 6, 7), greedy(2)).to_its_end()
    assert probe.summary.prompt_tokens_computed == 3


def flood(pair: Pair, num_running: int) -> list[Call]:
    """Send requests that together need nearly all blocks; return when `num_running` of them run."""
    others = [
        pair.decode(pair.new_id(), prompt, greedy(NUM_TOKENS), is_local=True)
        for prompt in other_prompts()
    ]
    for call in others[:num_running]:
        call.until_tokens(2)
    return others


def let_the_write_land(pair: Pair, late: Call) -> None:
    """Resume P while no other request can complete."""
    pair.d.hold_before_pass(1)
    pair.d.await_held()
    pair.p.let_go()
    pair.p.resume()
    late.however_it_ends()
    pair.d.let_go()


def is_idle_with(num_free_blocks: int, load: NodeLoad) -> bool:
    return not is_busy(load) and load.num_free_blocks == num_free_blocks


def other_prompts() -> list[tuple[int, ...]]:
    """Return prompts that take seven blocks each, answer included."""
    return [prompt_of(70, seed=10 + number) for number in range(NUM_OTHERS)]


def expected_answers(model: Path) -> list[list[int]]:
    return [reference_greedy(model, prompt, NUM_TOKENS) for prompt in other_prompts()]
