"""All that is counted: names by OpenTelemetry's rules, what they mean, labels, buckets. Pure.

Prometheus has underscores for dots, and the unit at the end. Autoscalers, dashboards and rules in
`deploy/` go by these names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


# UCUM's units, and what Prometheus calls them.
UNIT_NAMES = {"s": "seconds", "By": "bytes", "GBy/s": "gigabytes_per_second", "1": "ratio"}


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""  # UCUM; none for plain counts
    buckets: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """Without `_total`, `_bucket` and the like, which the kind adds."""
        name, unit = self.name.replace(".", "_"), UNIT_NAMES.get(self.unit, "")
        return name if not unit or name.endswith(f"_{unit}") else f"{name}_{unit}"


def _counter(name: str, text: str, *labels: str, unit: str = "") -> Metric:
    return Metric(name, Kind.COUNTER, text, labels, unit)


def _gauge(name: str, text: str, *labels: str, unit: str = "") -> Metric:
    return Metric(name, Kind.GAUGE, text, labels, unit)


def _histogram(name: str, text: str, unit: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, labels, unit, buckets)


# As the conventions advise for gen_ai.server.*; the other ones are ours.
DURATION_BUCKETS = tuple(0.01 * 2**n for n in range(14))
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCH_BUCKETS = tuple(float(2**n) for n in range(9))
RATE_BUCKETS = (0.001, 0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
SHARE_BUCKETS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)

READINGS_AGE = _gauge(
    "baton.readings.age",
    "How old the values are that one thread alone may read: above 0 while that has no time.",
    unit="s",
)

# --- The router's, of each request -------------------------------------------------------------

_CALL = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_response_model")
DURATION = _histogram(
    "gen_ai.server.request.duration",
    "From a request's arrival at the router to its end.",
    *("s", DURATION_BUCKETS, *_CALL, "error_type"),
)
TIME_TO_FIRST_TOKEN = _histogram(
    "gen_ai.server.time_to_first_token",
    "From a request's arrival at the router to its first token.",
    *("s", FIRST_TOKEN_BUCKETS, *_CALL),
)
TIME_PER_TOKEN = _histogram(
    "gen_ai.server.time_per_output_token",
    "Between the tokens of an answer after the first, on average.",
    *("s", PER_TOKEN_BUCKETS, *_CALL),
)
QUEUE_WAIT = _histogram(
    "baton.queue.wait", "How long requests waited for their turn.", "s", FIRST_TOKEN_BUCKETS
)
REQUESTS = _counter(
    "baton.requests",
    "Requests that ended, and how; served says where the prompt was computed.",
    *("outcome", "served"),
)
REFUSALS = _counter(
    "baton.refusals", "Requests refused before anything was done for them, by reason.", "reason"
)
TOKENS = _counter(
    "baton.tokens",
    "Tokens of prompts that nodes worked on, and of answers as far as they were passed on, by how "
    "the request ended.",
    *("kind", "outcome"),
)
ATTEMPTS = _counter(
    "baton.attempts",
    "Tries to serve a request: the first, a retry from the start, or a migration, which goes on "
    "where the answer broke off.",
    "kind",
)
SUSPECTS = _counter(
    "baton.suspects",
    "Tries that ended with the engine of their node, or whose pass failed, by what their request "
    "was found to be: a bystander or a suspect, which are tried again, or the poison.",
    "verdict",
)
REQUEST_KV_BYTES = _counter(
    "baton.request.kv_bytes",
    "KV that was handed over for requests, as their decode nodes told.",
    unit="By",
)

# --- The router's, at the moment ---------------------------------------------------------------

QUEUE_DEPTH = _gauge("baton.queue.depth", "Requests that wait for their turn.")
IN_FLIGHT = _gauge("baton.requests.in_flight", "Requests that nodes work on.")
OPEN_NODES = _gauge("baton.nodes.open", "Nodes that can be given requests.", "role")
TRACES_LOST = _counter(
    "baton.traces.lost", "Traces that went nowhere, for want of room or of a collector."
)

ROUTER_METRICS = (
    *(DURATION, TIME_TO_FIRST_TOKEN, TIME_PER_TOKEN, QUEUE_WAIT, REQUESTS, REFUSALS, TOKENS),
    *(ATTEMPTS, SUSPECTS, REQUEST_KV_BYTES, QUEUE_DEPTH, IN_FLIGHT, OPEN_NODES, TRACES_LOST),
    READINGS_AGE,
)

# --- The nodes' ----------------------------------------------------------------------------------

STEP = _histogram("baton.step", "How long the model ran in a step.", "s", STEP_BUCKETS)
BATCH = _histogram(
    "baton.step.requests", "How many requests took part in a step.", "", BATCH_BUCKETS
)
SILENCE = _gauge("baton.engine.silence", "Since the engine last moved on.", unit="s")
PROMPT_TOKENS_COMPUTED = _counter(
    "baton.prompt_tokens.computed",
    "Prompt tokens that were run through the model; on decode about 0.",
    "role",
)
SAMPLED_TOKENS = _counter("baton.tokens.sampled", "Tokens that were sampled.")
SPECULATED_TOKENS = _counter(
    "baton.tokens.speculated", "Tokens that speculation proposed, and that came true.", "kind"
)
HANDOFFS = _counter("baton.handoffs", "Hand-offs that ended.", "direction", "outcome")
KV_BYTES = _counter(
    "baton.kv.bytes",
    "KV of hand-offs that came to their end.",
    *("direction", "transport"),
    unit="By",
)
TRANSFER = _histogram(
    "baton.kv.transfer",
    "From the first order of a hand-off to its end.",
    *("s", STEP_BUCKETS, "direction"),
)
RATE = _histogram(
    "baton.kv.rate",
    "Speed of a hand-off's writes, from the first to the last.",
    *("GBy/s", RATE_BUCKETS),
)
OVERLAP = _histogram(
    "baton.kv.overlap",
    "Share of a hand-off's bytes that had landed before its prompt was computed.",
    *("1", SHARE_BUCKETS),
)
RUNNING = _gauge("baton.requests.running", "Requests in the batch.")
WAITING = _gauge(
    "baton.requests.waiting",
    "Requests that wait: in line, for KV of a peer, or with their KV for a place in the batch.",
    "status",
)
BLOCKS = _gauge(
    "baton.kv.blocks",
    "KV blocks by who has them; each counts once. cached: nobody, but a prefix may still hit it; "
    "granted: a peer may write it; fenced: a peer that was given up may.",
    "state",
)
PREEMPTIONS = _counter("baton.preemptions", "Requests that lost their blocks to others.")
PREFIX_TOKENS = _counter(
    "baton.prefix.tokens",
    "Prompt tokens that were looked up in the prefix cache, and those found.",
    "kind",
)
OPEN_HANDOFFS = _gauge(
    "baton.handoffs.open", "Hand-offs whose blocks may still be written or read.", "direction"
)
DIGEST_MISMATCHES = _counter(
    "baton.kv.digest_mismatches", "Hand-offs whose bytes were not those that were sent."
)
LINKS = _gauge("baton.kv.links", "Links to peers, by state.", "state")
LINKS_CUT = _counter("baton.kv.links_cut", "Links to peers that ended, for whatever reason.")
MESSAGES_DROPPED = _counter(
    "baton.kv.messages_dropped", "Words of peers that came late or twice; harmless."
)
TRANSPORT = _gauge("baton.kv.transport", "1 for what carries KV here.", "transport")

NODE_METRICS = (
    *(STEP, BATCH, SILENCE, PROMPT_TOKENS_COMPUTED, SAMPLED_TOKENS, SPECULATED_TOKENS, HANDOFFS),
    *(KV_BYTES, TRANSFER),
    *(RATE, OVERLAP, RUNNING, WAITING, BLOCKS, PREEMPTIONS, PREFIX_TOKENS, OPEN_HANDOFFS),
    *(DIGEST_MISMATCHES, LINKS, LINKS_CUT, MESSAGES_DROPPED, TRANSPORT, TRACES_LOST),
    READINGS_AGE,
)

METRICS = tuple(dict.fromkeys((*ROUTER_METRICS, *NODE_METRICS)))
BY_PROMETHEUS_NAME = {metric.prometheus: metric for metric in METRICS}
