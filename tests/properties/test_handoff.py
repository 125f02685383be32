"""Random histories of hand-offs and pulls: no write lands in a reused block, all end up free.

Each history is drawn from its seed: first the kinds of faults (few at a time find more than all
at once), then some dozens of steps. A failing seed is reproducible.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from baton.core.ids import HandoffId
from tests.support.handoff_shapes import BLOCK_SIZE, Shape, draw_shape
from tests.support.handoff_world import CONFIG, FINGERPRINT, Node, World
from tests.support.hypothesis_profiles import num_examples
from tests.support.lagging_memory import LaggingMemory
from tests.support.memory_transport import Wire

NUM_HISTORIES = num_examples(500)  # for each kind of wire
NUM_QUIET_HISTORIES = num_examples(150)
NUM_LAGGING_HISTORIES = num_examples(120)
NUM_STAGED_HISTORIES = num_examples(60)
NUM_PROVING_HISTORIES = num_examples(150)
QUIET_END_S = 25.0  # duration of a hold: decode gave up before it could report it
NUM_STEPS = 120
NUM_LAYERS = FINGERPRINT.layout.num_layers
NAMES = tuple(f"block {number}".encode() for number in range(5))  # of cached blocks
PULLING_SHARE = 0.4  # of the histories

Steps = dict[Callable[[], None], int]  # with how often each is taken


@dataclass
class History:
    """Random history of two prefill nodes and one decode node, with faults between them.

    In some, all nodes pull cached blocks from each other.
    """

    world: World
    draw: random.Random
    attempts: list[int] = field(default_factory=lambda: [0, 0, 0])
    wanted: dict[HandoffId, tuple[str, int]] = field(default_factory=dict)
    withdrawn: set[HandoffId] = field(default_factory=set)
    paces_s: tuple[float, ...] = (0.01, 0.1, 0.5)
    shape: Shape = Shape()  # of the model
    lengths: dict[HandoffId, int] = field(default_factory=dict)  # in tokens
    promised: set[HandoffId] = field(default_factory=set)  # pulls whose holder had all blocks
    has_evicted: bool = False

    def play(self, *, in_trouble: bool) -> None:
        self.introduce()
        daily: Steps = {
            self.decode_wants: 4,
            self.prefill_computes: 5,
            self.prefill_sends: 5,
            self.prefill_completes: 4,
            self.prefill_begins_a_pass: 4,
            self.a_layer_ends: 8,
            self.a_pass_ends: 2,
            self.deliver_messages: 8,
            self.blocks_land: 8,
            self.writes_are_acknowledged: 6,
            self.notices_come: 5,
            self.cancels_are_done: 3,
            self.all_take_a_turn: 10,
        }
        if self.world.lags:
            daily[self.a_device_continues] = 6
        if self.world.stages:
            daily[self.copies_land] = 8
        choices: Steps = {self.decode_gives_up: 2, self.prefill_withdraws: 1}
        if self.draw.random() < PULLING_SHARE:
            daily |= {self.a_node_caches: 4, self.a_node_pulls: 5, self.a_holder_answers: 6}
            choices[self.a_block_is_evicted] = 4
        troubles: Steps = {
            self.prefill_computes_without_receiver: 1,
            self.deliver_message_late: 3,
            self.deliver_message_twice: 2,
            self.lose_message: 1,
            self.a_link_breaks: 1,
            self.a_write_fails: 2,
            self.a_notice_comes_twice: 2,
            self.a_notice_is_lost: 1,
            self.a_notice_is_garbled: 1,
            self.a_process_stops: 1,
            self.a_process_continues: 2,
            self.a_prefill_node_restarts: 1,
            self.a_second_process_answers: 1,
            self.the_decode_node_restarts: 1,
            self.advance_time: 2,
        }
        possible = {**choices, **troubles} if in_trouble else choices
        known = [step for step in possible if self.draw.random() < 0.35]
        steps = {**daily, **{step: possible[step] for step in known}}
        for step in self.draw.choices(list(steps), list(steps.values()), k=NUM_STEPS):
            step()

    def introduce(self) -> None:
        """Connect the pairs in advance in most histories."""
        for p in ("p0", "p1")[: self.draw.choice([0, 2, 2, 2])]:
            self.world.receive(HandoffId(f"hello {p}", 0), p, 0, 0)
            self.world.revoke(HandoffId(f"hello {p}", 0))
        self.world.exchange()

    def end_prefill(self) -> None:
        """Abort the remaining requests on the prefill nodes, of which one has each node id."""
        self.world.kill_doubles()
        for handoff_id in list(self.world.sending):
            self.world.withdraw(handoff_id)

    # --- The two schedulers ---------------------------------------------------------------

    def decode_wants(self) -> None:
        request, p = self.draw.randrange(3), self.draw.choice(["p0", "p0", "p0", "p1"])
        handoff_id = HandoffId(f"r{request}", self.attempts[request])
        first, num_blocks = self.draw.choice([0, 0, 1]), self.draw.randrange(5)
        num_tokens = self.length_of(handoff_id, (first + num_blocks) * BLOCK_SIZE)
        first = min(first, num_tokens // BLOCK_SIZE)
        labels = self.shape.labels(num_tokens, first)
        first_block = self.shape.first_block(num_tokens, first)
        if self.world.receive(handoff_id, p, first_block, len(labels), labels):
            self.attempts[request] += 1
            self.wanted[handoff_id] = (p, num_tokens)

    def decode_gives_up(self) -> None:
        if self.world.receiving:
            self.world.revoke(self.draw.choice(sorted(self.world.receiving)))

    def prefill_computes(self) -> None:
        if self.wanted:
            handoff_id = self.draw.choice(sorted(self.wanted))
            p, num_tokens = self.wanted[handoff_id]
            if self.begin(handoff_id, p, num_tokens):
                del self.wanted[handoff_id]

    def length_of(self, handoff_id: HandoffId, drawn: int) -> int:
        """Return the prompt's length. With several groups, the order of the blocks depends on it;
        the scheduler refuses KV of another length, as this world does not.
        """
        return drawn if self.shape == Shape() else self.lengths.setdefault(handoff_id, drawn)

    def begin(self, handoff_id: HandoffId, p: str, num_tokens: int) -> bool:
        labels = self.shape.labels(num_tokens)
        num_state_blocks = self.shape.num_state_blocks
        return self.world.begin(handoff_id, p, len(labels), labels, num_state_blocks)

    def prefill_computes_without_receiver(self) -> None:
        """Compute a prompt that the decode node requests later or never."""
        request, num_blocks = self.draw.randrange(3), self.draw.randrange(5)
        handoff_id = HandoffId(f"r{request}", self.attempts[request])
        num_tokens = self.length_of(handoff_id, num_blocks * BLOCK_SIZE)
        if self.begin(handoff_id, "p0", num_tokens):
            self.attempts[request] += self.draw.randrange(2)

    def prefill_sends(self) -> None:
        if self.world.sending:
            handoff_id = self.draw.choice(sorted(self.world.sending))
            self.world.send(handoff_id, self.draw.randint(1, 3))

    def prefill_begins_a_pass(self) -> None:
        """Begin a pass that computes blocks of one or two prompts layer by layer."""
        node = self.world.ps[self.draw.choice(sorted(self.world.ps))]
        if node.num_layers_ended is None:
            here = sorted(h for h, sending in self.world.sending.items() if sending.node is node)
            taking_part = here[: self.draw.randint(1, 2)]
            self.world.begin_pass(node, {h: self.draw.randint(1, 4) for h in taking_part})

    def a_layer_ends(self) -> None:
        node = self.world.ps[self.draw.choice(sorted(self.world.ps))]
        if node.num_layers_ended is not None and node.num_layers_ended < NUM_LAYERS:
            self.world.end_layer(node)

    def a_pass_ends(self) -> None:
        self.world.end_pass(self.world.ps[self.draw.choice(sorted(self.world.ps))])

    def a_device_continues(self) -> None:
        memory = self.world.ps[self.draw.choice(sorted(self.world.ps))].memory
        if isinstance(memory, LaggingMemory):
            memory.catch_up(self.draw.randint(1, 4))

    def copies_land(self) -> None:
        self.draw.choice(self.world.staged_memories).land_copies(self.draw.randint(1, 6))

    def prefill_completes(self) -> None:
        if self.world.sending:
            self.world.complete(self.draw.choice(sorted(self.world.sending)))

    def prefill_withdraws(self) -> None:
        if self.world.sending:
            handoff_id = self.draw.choice(sorted(self.world.sending))
            self.withdrawn.add(handoff_id)
            self.world.withdraw(handoff_id)

    # --- Pulls ------------------------------------------------------------------------------

    def a_node_caches(self) -> None:
        self.world.cache(self._node(), self.draw.choice(NAMES))

    def a_node_pulls(self) -> None:
        """Pull blocks that the holder has, or mostly has, in any order."""
        node, holder = self.draw.sample(self.world.nodes, 2)
        known = sorted(set(holder.cached) - set(node.cached))
        if not known and self.draw.random() < 0.9:
            return
        known = known or list(NAMES)
        names = self.draw.sample(known, self.draw.randint(1, min(3, len(known))))
        if self.draw.random() < 0.1:
            names.append(self.draw.choice(NAMES))
        handoff_id = self.world.pull(node, holder.name, tuple(names))
        if handoff_id is not None and set(names) <= set(holder.cached):
            self.promised.add(handoff_id)

    def a_holder_answers(self) -> None:
        node = self._node()
        if node.requested:
            self.world.answer_pull(node)

    def a_block_is_evicted(self) -> None:
        node = self._node()
        if node.cached:
            self.has_evicted = True
            self.world.evict(node, self.draw.choice(sorted(node.cached)))

    # --- Turns and time ---------------------------------------------------------------------

    def all_take_a_turn(self) -> None:
        self.world.turn_all()
        self.world.now += self.draw.choice(self.paces_s)

    def advance_time(self) -> None:
        self.world.now += self.draw.choice([1.5, 4.0, 9.0])
        self.world.turn(self.draw.choice(self.world.nodes))

    # --- The link ---------------------------------------------------------------------------

    def deliver_messages(self) -> None:
        for node in [one for one in self.world.nodes if not one.is_stopped]:
            for _ in range(self.draw.randrange(6)):
                if node.link.queued:
                    node.link.pass_on(node.link.queued.pop(0))

    def deliver_message_late(self) -> None:
        """Move a message behind those that were sent after it."""
        queued = self._node().link.queued
        if queued:
            queued.append(queued.pop(self.draw.randrange(len(queued))))

    def deliver_message_twice(self) -> None:
        queued = self._node().link.queued
        if queued:
            queued.append(self.draw.choice(queued))

    def lose_message(self) -> None:
        queued = self._node().link.queued
        if queued:
            queued.pop(self.draw.randrange(len(queued)))

    def a_link_breaks(self) -> None:
        if self.world.hub.link_ids:
            self.world.hub.cut(self.draw.choice(self.world.hub.link_ids))

    # --- The wire ---------------------------------------------------------------------------

    def blocks_land(self) -> None:
        for _ in range(self.draw.randrange(8)):
            flying = [flight for flight in self.world.wire.flights if flight.missing]
            if flying:
                flight = self.draw.choice(flying)
                self.world.wire.land(flight, self.draw.choice(flight.missing))

    def writes_are_acknowledged(self) -> None:
        wire = self.world.wire
        for flight in [one for one in wire.flights if not one.missing and not one.is_acknowledged]:
            if self.draw.random() < 0.7:
                wire.acknowledge(flight)

    def a_write_fails(self) -> None:
        flying = [flight for flight in self.world.wire.flights if not flight.is_acknowledged]
        if flying:
            self.world.wire.fail(self.draw.choice(flying))

    def notices_come(self) -> None:
        for notice in list(self.world.wire.notices):
            if self.draw.random() < 0.7:
                self.world.wire.notice(*notice)

    def a_notice_comes_twice(self) -> None:
        if self.world.wire.notices:
            self.world.wire.notices.append(self.draw.choice(self.world.wire.notices))

    def a_notice_is_lost(self) -> None:
        if self.world.wire.notices:
            self.world.wire.notices.pop(self.draw.randrange(len(self.world.wire.notices)))

    def a_notice_is_garbled(self) -> None:
        if self.world.wire.notices:
            channel, ticket, note = self.world.wire.notices.pop()
            cut_short = note[: self.draw.randint(1, len(note))]
            self.world.wire.notices.append((channel, ticket, cut_short))

    def cancels_are_done(self) -> None:
        if self.world.wire.cancels:
            self.world.wire.quiet(*self.draw.choice(self.world.wire.cancels))

    # --- Processes --------------------------------------------------------------------------

    def a_process_stops(self) -> None:
        self._node().is_stopped = True

    def a_process_continues(self) -> None:
        self._node().is_stopped = False

    def a_prefill_node_restarts(self) -> None:
        self.world.restart_p(self.draw.choice(["p0", "p1"]))

    def a_second_process_answers(self) -> None:
        """Start a process with the node id and the address of a prefill node that is frozen."""
        if not self.world.doubles:
            self.world.double_p(self.draw.choice(["p0", "p1"]))

    def the_decode_node_restarts(self) -> None:
        self.world.restart_d()
        self.wanted.clear()

    def _node(self) -> Node:
        return self.draw.choice(self.world.nodes)


WIRES: dict[str, Callable[[], Wire]] = {
    "one-sided": Wire,
    "past the peer": lambda: Wire(is_direct=True),
    "two-sided": lambda: Wire(is_one_sided=False),
}


@pytest.mark.parametrize("wire", WIRES)
def test_no_write_lands_in_a_reallocated_block_and_all_blocks_end_free(wire: str) -> None:
    for seed in range(NUM_HISTORIES):
        with note_history(seed, wire):
            shape = draw_shape(seed)
            world = World(wire=WIRES[wire](), num_blocks=shape.num_blocks)
            history = History(world, random.Random(seed), shape=shape)
            history.play(in_trouble=True)
            history.end_prefill()
            history.world.settle()
            history.world.check_all_free()


@pytest.mark.parametrize("wire", WIRES)
def test_proved_blocks_of_lost_hand_offs_are_correct_and_stay_unchanged(wire: str) -> None:
    num_proved = 0
    for seed in range(NUM_PROVING_HISTORIES):
        with note_history(seed, wire):
            world = World(wire=WIRES[wire](), num_blocks=24, config=replace(CONFIG, verify=True))
            history = History(world, random.Random(seed))
            history.play(in_trouble=True)
            history.end_prefill()
            history.world.settle()
            history.world.check_all_free()
            num_proved += world.num_proved
    assert num_proved


@pytest.mark.parametrize("wire", ["one-sided", "two-sided"])
@pytest.mark.parametrize("waits_at_pass_end", [True, False])
def test_asynchronously_computed_kv_lands_as_computed(wire: str, waits_at_pass_end: bool) -> None:
    for seed in range(NUM_LAGGING_HISTORIES):
        with note_history(seed, wire):
            shape = draw_shape(seed)
            world = World(
                wire=WIRES[wire](),
                num_blocks=shape.num_blocks,
                lags=True,
                waits_at_pass_end=waits_at_pass_end,
            )
            history = History(world, random.Random(seed), shape=shape)
            history.play(in_trouble=True)
            history.end_prefill()
            history.world.settle()
            history.world.check_all_free()


@pytest.mark.parametrize("wire", WIRES)
def test_kv_that_passes_through_host_memory_lands_as_computed(wire: str) -> None:
    """No copy is made before its fence, and no slot or block is reused while one can land."""
    num_landed = 0
    for seed in range(NUM_STAGED_HISTORIES):
        with note_history(seed, wire):
            shape = draw_shape(seed)
            verify = bool(seed & 2)
            world = staged_world(wire, shape, verify=verify, waits_at_pass_end=bool(seed & 1))
            history = History(world, random.Random(seed), shape=shape)
            history.play(in_trouble=True)
            history.end_prefill()
            history.world.settle()
            history.world.check_all_free()
            num_landed += len(world.landed)
            mismatches = [node.worker.counters().num_digest_mismatches for node in world.nodes]
            assert not any(mismatches)
    assert num_landed


def staged_world(wire: str, shape: Shape, *, waits_at_pass_end: bool, verify: bool = True) -> World:
    return World(
        wire=WIRES[wire](),
        num_blocks=shape.num_blocks,
        config=replace(CONFIG, verify=verify),
        lags=True,
        stages=True,
        waits_at_pass_end=waits_at_pass_end,
    )


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("stages", [False, True])
def test_without_faults_every_computed_hand_off_lands_and_no_pair_is_closed(
    wire: str, stages: bool
) -> None:
    for seed in range(NUM_STAGED_HISTORIES if stages else NUM_QUIET_HISTORIES):
        with note_history(seed, wire):
            shape = draw_shape(seed)
            world = World(wire=WIRES[wire](), num_blocks=shape.num_blocks)
            if stages:
                world = staged_world(wire, shape, waits_at_pass_end=bool(seed % 2))
            history = History(world, random.Random(seed), paces_s=(0.01,), shape=shape)
            history.play(in_trouble=False)
            expected = {
                handoff_id
                for handoff_id, receiving in world.receiving.items()
                if handoff_id in world.sending
                and not (receiving.is_revoked or handoff_id in history.withdrawn)
            }
            awaited = {h for h, receiving in world.receiving.items() if not receiving.names}
            for handoff_id in awaited - set(world.sending):
                world.revoke(handoff_id)
            if not history.has_evicted:
                open_pulls = history.promised & set(world.receiving)
                expected |= {h for h in open_pulls if not world.receiving[h].is_revoked}
            for handoff_id in list(world.sending):
                world.complete(handoff_id)
            began_s = world.now
            world.settle()
            world.check_all_free()
            assert expected <= world.landed
            assert all(node.worker.counters().num_cut_pairs == 0 for node in world.nodes)
            assert world.now - began_s <= QUIET_END_S


@contextmanager
def note_history(seed: int, wire: str) -> Iterator[None]:
    try:
        yield
    except Exception as failure:
        failure.add_note(f"in history {seed} over a wire that is {wire}")
        raise
