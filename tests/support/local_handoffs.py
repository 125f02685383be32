"""Engines of one process that hand requests over to each other through NIXL, without gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType

from baton.checkpoint.peft_folder import PeftFolder
from baton.core.ids import AdapterRef, HandoffId, Incarnation, NodeId, Peer, RequestId
from baton.core.media import MediaSegment, Picture, StoredPicture, picture_salt
from baton.core.output import FinishReason, Output, RequestStats
from baton.core.request import ENCODE, PREFETCH, UNSAMPLED, EngineRequest, PrefixSource, ReceiveKv
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.factory import build_engine
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.loaded_runner import CachingRunner
from baton.engine.scheduler.config import SchedulerConfig
from baton.kv_transfer.config import KvWorkerConfig, ReceiverConfig
from baton.kv_transfer.pairs import Identity
from baton.kv_transfer.protocol.messages import Fingerprint
from baton.kv_transfer.records import TransferRecord
from baton.node.kv.worker import KvPassHook, NoteStaged, make_kv_worker
from baton.node.options import NodeOptions
from tests.support.kv_links import LinkHub

WAIT_S = 60.0
# One thread steps all engines: on a busy machine a peer is silent for the steps of others.
PATIENT = KvWorkerConfig(receiver=ReceiverConfig(lease_s=WAIT_S, silence_s=WAIT_S))
NUM_STEPS_TO_GRANT = 4  # so that layers can be sent as they end


@dataclass(slots=True)
class Continuation:
    """Output of one engine for one request. `served` is set at its end."""

    token_ids: list[int] = field(default_factory=list)
    served: RequestStats | None = None

    @property
    def num_received(self) -> int:
        """Return the number of tokens whose KV came from the prefill engine."""
        assert self.served is not None
        return self.served.num_received_tokens

    def take(self, output: Output) -> None:
        assert output.finish_reason is not FinishReason.ERROR, output
        self.token_ids += output.token_ids
        self.served = output.served


class HandoffEngine:
    """An engine with a KV worker over NIXL. A step computes at most `chunk` tokens."""

    def __init__(
        self,
        hub: LinkHub,
        name: str,
        runner: CachingRunner,
        chunk: int,
        staging_bytes: int = 0,
        *,
        async_scheduling: bool = False,
        note_staged: NoteStaged | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        link = hub.link(name)
        identity = Identity(NodeId(name), Incarnation(name), fingerprint_of(runner))
        options = NodeOptions(
            RunnerConfig("any"), kv_staging_bytes=staging_bytes, kv_worker=PATIENT
        )
        self._worker = make_kv_worker(
            options, identity, runner, link, note_staged=note_staged, clock=clock
        )
        link.events = self._worker.inbox
        self._runner = runner
        scheduling = SchedulerConfig(
            max_num_batched_tokens=chunk,
            max_num_seqs=4,
            push_layers=True,
            async_scheduling=async_scheduling,
        )
        self._engine = build_engine(runner, EngineOptions(scheduling), [self._worker])
        post = self._engine.post_from_pass
        runner.hook = KvPassHook(self._worker, runner.kv_memory.layout.groups, lambda: None, post)
        self.peer = Peer(NodeId(name), name)
        self._requests: dict[RequestId, Continuation] = {}

    def add(self, request: EngineRequest) -> Continuation:
        self._engine.scheduler.add(request)
        return self._requests.setdefault(request.request_id, Continuation())

    def load_adapter(self, folder: Path) -> str:
        """Load an adapter and return its id."""
        files, table = PeftFolder(folder), self._runner.adapters
        assert table is not None
        table.add(files.digest(), table.load(files))
        self._engine.scheduler.adapters.add(files.digest())
        return files.digest()

    def step(self) -> None:
        for output in self._engine.step():
            self._requests[output.request_id].take(output)

    def take_records(self) -> tuple[TransferRecord, ...]:
        return self._worker.take_records()

    def sends_before_the_end(self) -> bool:
        """Return whether each hand-off since the last call sent before its prefill ended."""
        records = self.take_records()
        times = [(record.first_post_s, record.computed_s) for record in records]
        return bool(times) and all(
            post and computed and post < computed for post, computed in times
        )

    def close(self) -> None:
        self._engine.close()
        self._runner.hook = None
        self._worker.__exit__(None, None, None)


class LocalHandoffs:
    """One prefill engine and some decode engines. Decode engines can die."""

    def __init__(
        self,
        prefill: CachingRunner,
        decodes: Sequence[CachingRunner],
        *,
        chunk: int,
        staging_bytes: int = 0,
        wait: Callable[[], None] = lambda: None,
        async_scheduling: bool = False,
        note_staged: NoteStaged | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wait` is called between steps, to let the time of a simulated device pass.

        `clock` times the copies that are given to `note_staged`.
        """
        self._hub = LinkHub()
        self._wait = wait
        make = partial(
            HandoffEngine,
            chunk=chunk,
            staging_bytes=staging_bytes,
            async_scheduling=async_scheduling,
            note_staged=note_staged,
            clock=clock,
        )
        self.prefill = make(self._hub, "prefill", prefill)
        self.decodes = [
            make(self._hub, f"decode-{number}", runner) for number, runner in enumerate(decodes)
        ]
        self._num_requests = 0

    def __enter__(self) -> LocalHandoffs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for engine in (self.prefill, *self.decodes):
            engine.close()

    def answer(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        prior: Sequence[int] = (),
        until: int | None = None,
        adapter_id: str = "",
        media: Sequence[MediaSegment] = (),
        pictures: Sequence[Picture] = (),
    ) -> Continuation:
        """Hand a request to the first decode engine, and run both to its end.

        `prior` are tokens of the answer from elsewhere, which `num_tokens` includes. With `until`,
        stop after this number of tokens.
        """
        request_id = self._next_id()
        handoff_id, receiver = HandoffId(request_id, 1), self.decodes[0]
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        request = EngineRequest(
            request_id,
            tuple(prompt),
            sampling,
            seed=0,
            prior_output_token_ids=tuple(prior),
            adapter=AdapterRef(adapter_id, adapter_id),
            media=tuple(media),
        )
        source = ReceiveKv(handoff_id, self.prefill.peer)
        answer = receiver.add(replace(request, receive_from=source))
        for _ in range(NUM_STEPS_TO_GRANT):
            receiver.step()
            self.prefill.step()
        sent = self.prefill.add(replace(request, send_to=handoff_id, pictures=tuple(pictures)))
        deadline_s = time.monotonic() + WAIT_S
        while answer.served is None and (until is None or len(answer.token_ids) < until):
            assert time.monotonic() < deadline_s, "the request does not end"
            self.prefill.step()
            receiver.step()
            self._wait()
        assert sent.token_ids == answer.token_ids[:1]
        return answer

    def encode(self, stored: StoredPicture, picture: Picture) -> None:
        """Have the first engine encode a picture, and the first decode engine pull the encoding."""
        request = EngineRequest(
            self._next_id(),
            stored.token_ids,
            UNSAMPLED,
            seed=0,
            task=ENCODE,
            media=stored.media,
            pictures=(picture,),
            cache_salt=picture_salt(""),
        )
        encoded = self.prefill.add(request)
        self._run_until_served(encoded)
        source = PrefixSource(self.prefill.peer, stored.num_cached_tokens)
        pull = replace(request, task=PREFETCH, pictures=(), prefix_source=source)
        pulled = self.decodes[0].add(replace(pull, request_id=self._next_id()))
        self._run_until_served(pulled)
        assert pulled.served is not None
        assert pulled.served.num_cached_tokens == stored.num_cached_tokens

    def answer_alone(self, request: EngineRequest) -> Continuation:
        """Run a request on the first decode engine alone."""
        answer = self.decodes[0].add(request)
        self._run_until_served(answer)
        return answer

    def _next_id(self) -> RequestId:
        self._num_requests += 1
        return RequestId(f"r{self._num_requests}")

    def _run_until_served(self, answer: Continuation) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while answer.served is None:
            assert time.monotonic() < deadline_s, "the request does not end"
            self.prefill.step()
            self.decodes[0].step()

    def kill_decode(self) -> None:
        """Remove the first decode engine with all of its requests. Its links break."""
        engine = self.decodes.pop(0)
        self._hub.remove(engine.peer.address)
        engine.close()


def fingerprint_of(runner: CachingRunner) -> Fingerprint:
    return Fingerprint(runner.info.fingerprint, runner.kv_memory.blocks)
