"""Each kind of fault, once, to each role it can strike: under load, every answer stays right."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from baton.bench.chaos import ONCE, Chaos
from baton.bench.chaos_asks import Known, asks, known
from baton.bench.chaos_faults import ROLES_HIT_BY, Fault, Kind, Phase, Role
from baton.bench.chaos_report import Report
from baton.bench.chaos_stage import Setting, Stage
from baton.client import AsyncClient
from tests.support.models import VARIANTS, make_model_folder

NUM_ASKS = 15
NUM_CLIENTS = 4
LASTS_S = 1.0
FAULTS = [(kind, role) for kind in Kind for role in ROLES_HIT_BY[kind]]

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Running:
    runner: asyncio.Runner
    stage: Stage
    answers: Sequence[Known]

    def through(self, fault: Fault) -> Report:
        async def scene() -> Report:
            async with AsyncClient(self.stage.address, retries=ONCE) as client:
                chaos = Chaos(self.stage, client, self.answers, NUM_CLIENTS)
                return await chaos.run([fault], fault.at_s, asyncio.Event())

        return self.runner.run(scene())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One cluster for all: each test leaves it well."""
    folder = make_model_folder(tmp_path_factory.mktemp("models") / "tiny", VARIANTS["llama"])
    small = ("--kv-cache-memory", "512KiB", "--threads", "1")
    with asyncio.Runner() as runner:
        stage = runner.run(entered(Setting(str(folder), node_arguments=small)))
        try:
            yield Running(runner, stage, runner.run(answers_of(stage)))
        finally:
            runner.run(stage.__aexit__(None, None, None))


async def entered(setting: Setting) -> Stage:
    return await Stage(setting).__aenter__()


async def answers_of(stage: Stage) -> Sequence[Known]:
    async with AsyncClient(stage.address) as client:
        answers = await known(client, await asks(client, 0, NUM_ASKS))
    await stage.begin()
    return answers


@pytest.mark.parametrize(("kind", "role"), FAULTS, ids=lambda one: one.value)
def test_no_answer_is_wrong_or_lost_and_nothing_is_left_behind(
    running: Running, kind: Kind, role: Role
) -> None:
    phase = list(Phase)[FAULTS.index((kind, role)) % len(Phase)]
    fault = Fault(0, 0.3, kind, role, 0, phase, LASTS_S)

    report = running.through(fault)

    assert report.is_good, report
    assert report.num_faults == 1
    assert report.counts["right"] > 0
