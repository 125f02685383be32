"""vLLM server as its consumers see it: a side channel and a NIXL agent over blocks of KV.

`python -m tests.support.fake_vllm` runs one in a process of its own, which tests can stop or kill.
It writes its parameters to the standard output as JSON.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import zmq

from baton.core.foreign_kv import ForeignKv
from baton.kv_transfer.layout import KvLayout, KvPacking
from baton.kv_transfer.transports.nixl import agent_config, import_nixl
from baton.node.kv.foreign.config import ForeignSource
from baton.node.kv.foreign.metadata import CPU_BACKEND, compatibility_hash

HOST = "127.0.0.1"
LAYOUT = KvLayout("bfloat16", 16, num_layers=3, num_kv_heads=2, head_dim=16)  # of nodes
POLL_MS = 1
LOOPBACK = {"engine_config": "NET_DEVICES=lo,TLS=tcp"}


@dataclass(frozen=True, slots=True)
class FakeGeometry:
    node: KvLayout = LAYOUT
    model: str = "models/demo"
    num_blocks: int = 64
    block_size: int = 32
    backend: str = CPU_BACKEND

    @property
    def layer_bytes(self) -> int:
        return replace(self.node, block_size=self.block_size).layer_bytes


class FakeVllm:
    """Serves within a `with` block. `metadata`, `payload` and `reply` can be changed by tests."""

    def __init__(self, geometry: FakeGeometry | None = None, engine_id: str = "engine-1") -> None:
        self.geometry = geometry = geometry or FakeGeometry()
        self.engine_id = engine_id
        num_bytes = geometry.num_blocks * geometry.layer_bytes
        self.layers = [mmap.mmap(-1, num_bytes) for _ in range(geometry.node.num_layers)]
        for layer in self.layers:
            layer.write(os.urandom(num_bytes))
        self.notes: list[str] = []
        self.num_requests = 0
        self.num_used_blocks = 0
        self.answers = True  # to requests on the side channel
        self._agent = self._make_agent()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port(f"tcp://{HOST}")
        self.metadata = self._metadata()
        self.hash = compatibility_hash(self.source, geometry.node, geometry.backend, is_hybrid=True)
        self.change_reply: Callable[[list[bytes]], list[bytes]] = lambda parts: parts
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run)
        self._changed = threading.Condition()

    def __enter__(self) -> FakeVllm:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        self._thread.join()
        self._context.destroy(linger=0)

    @property
    def source(self) -> ForeignSource:
        packing = KvPacking.VLLM_VEC if self.geometry.backend == CPU_BACKEND else None
        return ForeignSource(HOST, self.port, self.geometry.model, packing)

    def kv(self, block_ids: tuple[int, ...], request_id: str = "cmpl-1") -> ForeignKv:
        num_tokens = len(block_ids) * self.geometry.block_size
        return ForeignKv(HOST, self.port, self.engine_id, request_id, block_ids, num_tokens)

    def block(self, block_id: int) -> bytes:
        """Return a block of all layers."""
        size = self.geometry.layer_bytes
        return b"".join(layer[block_id * size : (block_id + 1) * size] for layer in self.layers)

    def write_block(self, block_id: int, by_layer: Sequence[bytes]) -> None:
        size = self.geometry.layer_bytes
        for layer, content in zip(self.layers, by_layer, strict=True):
            layer[block_id * size : (block_id + 1) * size] = content

    def params(self, kv: ForeignKv, num_tokens: int) -> dict[str, Any]:
        """Return the `kv_transfer_params` of an answer."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(kv.block_ids)],
            "remote_engine_id": kv.engine_id,
            "remote_request_id": kv.request_id,
            "remote_host": kv.host,
            "remote_port": kv.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": num_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }

    def await_note(self, wanted: Callable[[str], bool], timeout_s: float = 10.0) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(wanted, self.notes)), timeout_s)
            return next(filter(wanted, self.notes))

    def _make_agent(self) -> Any:
        nixl = import_nixl()
        agent = nixl.nixlAgent(os.urandom(8).hex(), agent_config(nixl))
        agent.createBackend("UCX", LOOPBACK)
        regions = [(_address(layer), len(layer), 0, "") for layer in self.layers]
        agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, regions), [])
        return agent

    def _metadata(self) -> dict[str, Any]:
        geometry, num_layers = self.geometry, self.geometry.node.num_layers
        return {
            "engine_id": self.engine_id,
            "agent_metadata": self._agent.getLocalMD(),
            "kv_caches_base_addr": [_address(layer) for layer in self.layers],
            "device_id": 0,
            "num_blocks": geometry.num_blocks,
            "block_lens": [geometry.layer_bytes] * num_layers,
            "block_strides": [geometry.layer_bytes] * num_layers,
            "kv_cache_layout": "LBHNC",
            "block_size": geometry.block_size,
            "ssm_sizes": (0, 0),
            "attn_backend_name": geometry.backend,
            "physical_blocks_per_logical_kv_block": 1,
            "region_num_blocks": [geometry.num_blocks] * num_layers,
            "region_group_ids": [0] * num_layers,
            "region_names": [f"model.layers.{i}.self_attn.attn" for i in range(num_layers)],
            "region_mem_types": ["DRAM"] * num_layers,
        }

    def _run(self) -> None:
        while not self._is_stopping:
            if self._socket.poll(POLL_MS):
                self._reply(self._socket.recv_multipart())
            notes = [note for group in self._agent.getNotifs({}, []).values() for note in group]
            if notes:
                with self._changed:
                    self.notes += [note.decode() for note in notes]
                    self._changed.notify_all()

    def _reply(self, request: list[bytes]) -> None:
        identity, _, _ = request
        self.num_requests += 1
        if not self.answers:
            return
        payload = {
            "compatibility_hash": self.hash,
            "agent_metadata_bytes": msgspec.msgpack.encode(self.metadata),
        }
        parts = [msgspec.msgpack.encode(payload), msgspec.msgpack.encode(time.perf_counter())]
        self._socket.send_multipart([identity, b"", *self.change_reply(parts)])


def recorded_reply() -> list[bytes]:
    """Return a handshake of vLLM 0.32.0 on a CPU, started with `--model models/demo`."""
    recorded = Path(__file__).parents[1] / "golden" / "vllm" / "handshake.msgpack"
    return [recorded.read_bytes(), msgspec.msgpack.encode(1999.25)]


def on_engine(kv: ForeignKv, engine_id: str) -> ForeignKv:
    return replace(kv, engine_id=engine_id)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def main() -> None:
    """Serve large blocks until the standard input ends."""
    geometry = FakeGeometry(num_blocks=4, block_size=1 << 14)
    with FakeVllm(geometry) as server:
        print(json.dumps({"port": server.port}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
