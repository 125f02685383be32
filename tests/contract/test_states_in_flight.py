"""Models with recurrent layers: passes launched before the result of the one before is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.ids import RequestId
from baton.core.output import Output
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.core import EngineCore
from baton.engine.kv_cache.groups import NUM_STATE_COPIES, CacheConfig, CacheLayout
from baton.engine.plan import Runner
from baton.engine.runner.kernels.choose import TORCH, Parts
from baton.engine.runner.load import load_runner
from tests.support.device_engines import (
    GREEDY,
    POISON,
    RANDOM,
    Answers,
    add_requests,
    engine_of,
    poisoned_copy,
)
from tests.support.device_runners import GRAPHABLE, RunnerOnThreads, config_of, runner_on
from tests.support.fake_device import FakeDevice
from tests.support.families import SHALLOW_STATE_VARIANTS
from tests.support.models import make_model_folder, prompt_of

pytestmark = pytest.mark.usefixtures("one_thread")

ABORTED = RequestId("aborted")
NUM_ROWS, NUM_TOKEN_BLOCKS = 3, 7
FORM = StructuredOutputs(regex="not used")
RANDOM = replace(RANDOM, banned_token_ids=(POISON,))
LONG = prompt_of(60, seed=1)


@pytest.fixture(scope="module", params=SHALLOW_STATE_VARIANTS)
def recurrent_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    own = tmp_path_factory.mktemp(request.param)
    healthy = make_model_folder(own / "healthy", SHALLOW_STATE_VARIANTS[request.param])
    return poisoned_copy(healthy, own / "poisoned")


def request_of(name: str, prompt: tuple[int, ...], sampling: SamplingParams) -> EngineRequest:
    return EngineRequest(RequestId(name), prompt, sampling, seed=len(name))


FIRST = [
    request_of("chunks", LONG, replace(RANDOM, repetition_penalty=1.2, max_tokens=3)),
    request_of(ABORTED, prompt_of(5), replace(RANDOM, max_tokens=40)),
]
# The first one hits a snapshot, and three of them need more blocks than there are.
SECOND = [
    request_of("longer", (*LONG[:48], *prompt_of(14)), replace(RANDOM, max_tokens=6)),
    request_of("grows", prompt_of(14), replace(RANDOM, max_tokens=6)),
    request_of(
        "grammar", prompt_of(13), replace(GREEDY, structured_outputs=FORM, ignore_eos=False)
    ),
    request_of("stop", prompt_of(9), replace(RANDOM, stop_token_ids=tuple(range(150)))),
    request_of("not finite", prompt_of(4), replace(GREEDY, allowed_token_ids=(POISON,))),
]


def an_engine(runner: Runner, layout: CacheLayout, *, is_async: bool) -> EngineCore:
    num_blocks = NUM_ROWS * NUM_STATE_COPIES * layout.num_state_blocks + NUM_TOKEN_BLOCKS
    return engine_of(runner, CacheConfig(num_blocks, 16, layout), async_scheduling=is_async)


def answers(engine: EngineCore) -> Answers:
    """Run both lots of requests, one of which is aborted once it has a token."""
    outputs: list[Output] = []
    add_requests(engine, FIRST)
    while not any(output.request_id == ABORTED for output in outputs):
        outputs += engine.step()
    engine.scheduler.abort(ABORTED)
    for requests in ([], SECOND):
        add_requests(engine, requests)
        while engine.scheduler.has_work:
            outputs += engine.step()
    engine.close()
    engine.scheduler.check()
    found: Answers = {}
    for output in outputs:
        found.setdefault(output.request_id, []).append(output)
    return found


@pytest.mark.parametrize(
    "parts", [TORCH, pytest.param(GRAPHABLE, marks=pytest.mark.triton)], ids=["eager", "graphs"]
)  # graphs: long, as the tests of Triton's kernels
def test_outputs_equal_those_of_synchronous_steps(
    recurrent_folder: Path,
    parts: Parts,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One pass fails when it is launched. The result of another one is lost when the next one is
    launched already.
    """
    device = FakeDevice()
    with runner_on(device, recurrent_folder, parts) as runner:
        on_threads = RunnerOnThreads(runner.launch, device)
        on_threads.fails_at_launch, on_threads.fails_at_collect = 5, 12
        engine = an_engine(on_threads, runner.kv_memory.layout, is_async=True)
        recompute, idle = engine.scheduler.recompute, list[bool]()

        def note_idle(request_ids: Iterable[RequestId]) -> None:
            idle.append(device.is_idle)
            recompute(request_ids)

        monkeypatch.setattr(engine.scheduler, "recompute", note_idle)
        found = answers(engine)
    with load_runner(config_of(recurrent_folder)) as on_cpu:
        expected = answers(an_engine(on_cpu, on_cpu.kv_memory.layout, is_async=False))

    assert tokens_of(found) == tokens_of(expected)
    ends = {name: outputs[-1].finish_reason for name, outputs in found.items()}
    assert ends == {name: outputs[-1].finish_reason for name, outputs in expected.items()}
    stats = engine.scheduler.stats()
    assert stats.total_prefix_hit_tokens >= 48
    assert stats.total_preemptions == 1 + 2  # for lack of blocks, and with the lost result
    assert "computing 2 states again" in caplog.text
    assert idle == [True]  # when their blocks are released
    assert on_threads.follows[1:5] == [True] * 4  # chunks, snapshots and decodes
    assert sum(on_threads.follows) > 10


def tokens_of(answered: Answers) -> dict[str, list[int]]:
    return {
        name: [token_id for output in outputs for token_id in output.token_ids]
        for name, outputs in answered.items()
    }
