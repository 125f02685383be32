"""Whole nodes in child processes whose forward passes a test can block.

The processes run `node.run.serve` as the command line does. All that a test adds is a gate in
front of the runner: it makes moments that last microseconds last until the test has done what it
wants to do in them.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from enum import Enum
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, cast

import grpc

import baton.kv_transfer.transports.nixl
import baton.node.kv.worker
from baton.cluster import await_serving
from baton.core.ids import HandoffId
from baton.core.legs import LegKind
from baton.engine.plan import Pending, Plan
from baton.engine.runner.load import load_runner
from baton.engine.runner.model_info import PassHook
from baton.engine.runner.model_runner import TorchRunner
from baton.kv_transfer.fence import PASSED
from baton.kv_transfer.transports.base import Write
from baton.kv_transfer.transports.nixl import NixlChannel
from baton.kv_transfer.types import KvOrders, KvReports
from baton.kv_transfer.worker import KvTransferWorker
from baton.node.options import NodeOptions
from baton.node.run import serve
from baton.node.wiring import identify
from baton.telemetry.resource import Process
from baton.telemetry.tracing.tracer import NO_TRACER
from tests.support.forked_forkserver import fork_context
from tests.support.ports import free_port

WAIT_S = 30.0  # for what must come
PROGRESS_S = 0.002
NO_LAYER = -1  # last completed layer: nothing of this pass may be sent yet
PR_SET_PDEATHSIG = 1


class Place(Enum):
    PASS = "a forward pass"
    POST = "a write given to the transport"


@dataclass(frozen=True, slots=True)
class Hold:
    """Order to block before the `count`-th occurrence of a place."""

    place: Place
    count: int  # 1 is the next one
    moves_bytes: bool = False  # whether the wire is looked after meanwhile, as in a long pass
    lasts_s: float | None = None  # the duration of a layer; None: until released


class Gate:
    """Gate at which a thread of the engine blocks on a test's order.

    If passes have a thread of their own, both threads use it. While one of them stands still, the
    other one passes.
    """

    def __init__(self, orders: Connection) -> None:
        self._orders = orders
        self._lock = Lock()
        self._hold: Hold | None = None
        self._is_closed = False  # the next message is the release

    def advance_to(self, place: Place, hook: PassHook | None = None) -> None:
        with self._lock:
            hold = self._take_hold(place)
        if hold is None:
            return
        if hold.lasts_s is not None:
            time.sleep(hold.lasts_s)
        else:
            self._stand_still(hook if hold.moves_bytes else None)

    def _take_hold(self, place: Place) -> Hold | None:
        """Return the order to block here, if there is one."""
        if self._is_closed:
            return None
        if self._hold is None and self._orders.poll():
            self._hold = self._orders.recv()
        hold = self._hold
        if hold is None or hold.place is not place:
            return None
        self._hold = replace(hold, count=hold.count - 1) if hold.count > 1 else None
        if self._hold is not None:
            return None
        self._is_closed = hold.lasts_s is None
        return hold

    def _stand_still(self, hook: PassHook | None) -> None:
        self._orders.send("held")
        while not self._orders.poll(None if hook is None else PROGRESS_S):
            if hook is not None:
                hook.layer_done(NO_LAYER, PASSED)
        self._orders.recv()
        with self._lock:
            self._is_closed = False


class GatedRunner:
    """TorchRunner behind a gate. Counts the tokens it runs."""

    def __init__(self, runner: TorchRunner, gate: Gate, num_tokens: Any) -> None:
        self._runner = runner
        self._gate = gate
        self._num_tokens = num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    @property
    def hook(self) -> PassHook | None:
        return self._runner.hook

    @hook.setter
    def hook(self, hook: PassHook | None) -> None:
        self._runner.hook = hook

    def launch(self, plan: Plan) -> Pending:
        if plan.num_scheduled_tokens:
            self._gate.advance_to(Place.PASS, self.hook)
            self._num_tokens.value += sum(plan.num_scheduled_tokens.values())
        return self._runner.launch(plan)


class UnfencedWorker(KvTransferWorker):
    """KV worker without the fence of a decode node: revoked blocks are released at once."""

    _revoked: tuple[HandoffId, ...] = ()
    _given_back: frozenset[HandoffId] = frozenset()

    def start(self, orders: KvOrders, now: float) -> None:
        super().start(orders, now)
        self._revoked += orders.revokes

    def poll(self, now: float) -> KvReports:
        reports = super().poll(now)
        late = tuple(one for one in reports.released if one not in self._given_back)
        early = tuple(one for one in self._revoked if one not in late)
        self._revoked = ()
        self._given_back |= frozenset(early)
        return replace(reports, released=early + late)


class EngineNode:
    """Handle of one node process. The node can be killed and restarted at its address."""

    def __init__(self, role: LegKind, options: NodeOptions, *, has_fence: bool = True) -> None:
        self._role = role
        self._options = replace(options, port=options.port or free_port())
        self._has_fence = has_fence
        self._context = fork_context()
        self.address = f"{self._options.host}:{self._options.port}"
        self.start()

    def start(self) -> None:
        self._orders, theirs = self._context.Pipe()
        self._num_tokens = self._context.RawValue(ctypes.c_longlong, 0)
        self._process = self._context.Process(
            target=_serve,
            args=(self._role, self._options, theirs, self._num_tokens, self._has_fence),
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self._is_held = False

    def await_ready(self) -> EngineNode:
        with grpc.insecure_channel(self.address) as channel:
            grpc.channel_ready_future(channel).result(WAIT_S)
        await_serving(self.address, WAIT_S)
        return self

    @property
    def node_id(self) -> str:
        return self._options.node_id

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def num_tokens_run(self) -> int:
        """Return the number of tokens run since the start."""
        return int(self._num_tokens.value)

    @property
    def is_held(self) -> bool:
        """Return whether the node was ordered to block and not released yet."""
        return self._is_held

    def hold_before_pass(self, count: int) -> None:
        self._hold(Hold(Place.PASS, count, moves_bytes=True))

    def slow_down_pass(self, count: int, by_s: float) -> None:
        """Block the engine thread for `by_s` in that pass, as a slow first layer would."""
        self._orders.send(Hold(Place.PASS, count, lasts_s=by_s))

    def hold_before_post(self, count: int) -> None:
        self._hold(Hold(Place.POST, count))

    def await_held(self) -> None:
        if not self._orders.poll(WAIT_S):
            raise TimeoutError(f"{self.node_id} did not come to the gate")
        self._orders.recv()

    def let_go(self) -> None:
        self._is_held = False
        self._orders.send("go")

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def terminate(self) -> None:
        self._process.terminate()

    def exit_code(self, timeout_s: float) -> int | None:
        """Return the exit code, or None if the process has not ended by the timeout."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def end(self) -> int | None:
        """Drain the node, kill it if that takes too long, and return its exit code."""
        if self.is_alive:
            self.resume()
            self._process.terminate()
            self._process.join(WAIT_S)
        self.kill()
        return self._process.exitcode

    def _hold(self, hold: Hold) -> None:
        self._is_held = True
        self._orders.send(hold)


def _serve(
    role: LegKind, options: NodeOptions, orders: Connection, num_tokens: Any, has_fence: bool
) -> None:
    # A stopped or blocked process would not handle SIGTERM.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gate = Gate(orders)
    _put_gate_before_posts(gate)
    if not has_fence:
        _leave_out_the_fence()
    with load_runner(options.runner_config) as runner:
        gated = cast("TorchRunner", GatedRunner(runner, gate, num_tokens))
        asyncio.run(_node(role, options, gated))


def _node(role: LegKind, options: NodeOptions, runner: TorchRunner) -> Coroutine[Any, Any, None]:
    identity = identify(options, role, runner)
    process = Process(role.value, identity.node_id, identity.incarnation)
    return serve(process, options, runner, identity, NO_TRACER)


def _put_gate_before_posts(gate: Gate) -> None:
    """Replace the channel class in this process by one with a gate."""

    class GatedChannel(NixlChannel):
        def post(self, write: Write) -> None:
            gate.advance_to(Place.POST)
            super().post(write)

    setattr(baton.kv_transfer.transports.nixl, "NixlChannel", GatedChannel)  # noqa: B010


def _leave_out_the_fence() -> None:
    setattr(baton.node.kv.worker, "KvTransferWorker", UnfencedWorker)  # noqa: B010
