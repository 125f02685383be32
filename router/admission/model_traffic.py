"""Admission and retries by model: the requests of one model do not wait for those of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from baton.core.ids import ANY_MODEL, ModelVariant
from baton.router.admission.admission import AdmissionControl
from baton.router.admission.admission_queue import INITIAL_CAPACITY, AdmissionQueueConfig
from baton.router.dispatch.retries import RetryBudget


class ModelTraffic:
    """Admission and retry budget of the requests to one model."""

    def __init__(self, config: AdmissionQueueConfig, clock: Callable[[], float]) -> None:
        self.admission = AdmissionControl(config, clock)
        self.retry_budget = RetryBudget(config.max_in_flight or INITIAL_CAPACITY)


class TrafficByModel:
    """Traffic of all models that nodes serve, or have served.

    Clients cannot add any: requests to names that are not served share the first model's.
    """

    def __init__(self, config: AdmissionQueueConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        # Of requests that arrive before a node does. The first model takes it over.
        self._first = ModelTraffic(config, clock)
        self._by_name: dict[str, ModelTraffic] = {}

    def of(self, model: ModelVariant = ANY_MODEL) -> ModelTraffic:
        """Return the traffic of a base model and its adapters."""
        return self._by_name.get(model.base, self._first)

    def resize(self, batch_slots: Mapping[str, int]) -> None:
        """Set how many requests the nodes of each model run at once, and admit more of them.

        A model that is not served any more keeps its measurements, and its capacity.
        """
        for name, num_batch_slots in batch_slots.items():
            if name not in self._by_name:
                is_first = not self._by_name
                traffic = self._first if is_first else ModelTraffic(self._config, self._clock)
                self._by_name[name] = traffic
            self._by_name[name].admission.resize(num_batch_slots)

    @property
    def num_waiting(self) -> int:
        return sum(traffic.admission.queue.num_waiting for traffic in self._all())

    @property
    def num_in_flight(self) -> int:
        return sum(traffic.admission.queue.num_in_flight for traffic in self._all())

    def _all(self) -> Iterator[ModelTraffic]:
        return iter(self._by_name.values() if self._by_name else (self._first,))
