"""Admission and retries by model."""

from __future__ import annotations

from asyncio import Event

from baton.core.ids import ANY_MODEL, AdapterRef, ModelVariant
from baton.router.admission.admission import TrafficByModel
from baton.router.admission.admission_queue import AdmissionQueueConfig

A, B, OTHER = (ModelVariant(name) for name in ("a", "b", "other"))


def traffic_by_model(config: AdmissionQueueConfig | None = None) -> TrafficByModel:
    return TrafficByModel(config or AdmissionQueueConfig(), clock=lambda: 0.0)


def test_each_model_has_a_queue_and_a_retry_budget_of_its_own() -> None:
    traffic = traffic_by_model(AdmissionQueueConfig(max_in_flight=2))
    traffic.resize({"a": 8, "b": 8})
    a, b = traffic.of(A), traffic.of(B)

    assert [a.admission.queue.join(Event(), 0) for _ in range(3)] == [
        True,
        True,
        False,
    ]
    assert b.admission.queue.join(Event(), 0)
    assert [a.retry_budget.spend() for _ in range(3)] == [True, True, False]
    assert b.retry_budget.spend()
    assert (traffic.num_in_flight, traffic.num_waiting) == (3, 1)


def test_adapters_share_the_queue_of_their_base() -> None:
    traffic = traffic_by_model()
    traffic.resize({"a": 8})

    assert traffic.of(ModelVariant("a", AdapterRef("adapter", "1"))) is traffic.of(A)


def test_the_first_model_takes_over_what_arrived_before_it() -> None:
    traffic = traffic_by_model()
    early = traffic.of(ANY_MODEL)
    early.admission.queue.join(Event(), 0)

    traffic.resize({"a": 1})

    assert traffic.of(A) is early
    assert not traffic.of(A).admission.queue.join(Event(), 0)
    assert (traffic.num_in_flight, traffic.num_waiting) == (1, 1)


def test_clients_cannot_add_queues_and_models_that_left_keep_theirs() -> None:
    traffic = traffic_by_model()
    traffic.resize({"a": 1, "b": 1})
    kept = traffic.of(B)

    traffic.resize({"a": 1})

    assert traffic.of(B) is kept
    assert traffic.of(OTHER) is traffic.of(A)
