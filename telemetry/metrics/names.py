"""Metrics: OpenTelemetry names, help texts, labels and buckets. Pure.

Prometheus names have underscores for dots and end with the unit. Autoscalers, dashboards and
alerting rules in `deploy/` use these names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


# UCUM units and their names in Prometheus.
UNIT_NAMES = {"s": "seconds", "By": "bytes", "GBy/s": "gigabytes_per_second", "1": "ratio"}


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""  # UCUM; empty for plain counts
    buckets: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """Name in Prometheus, without the suffix that the kind adds, such as `_total`."""
        name, unit = self.name.replace(".", "_"), UNIT_NAMES.get(self.unit, "")
        return name if not unit or name.endswith(f"_{unit}") else f"{name}_{unit}"


def _counter(name: str, text: str, *labels: str, unit: str = "") -> Metric:
    return Metric(name, MetricKind.COUNTER, text, labels, unit)


def _gauge(name: str, text: str, *labels: str, unit: str = "") -> Metric:
    return Metric(name, MetricKind.GAUGE, text, labels, unit)


def _histogram(name: str, text: str, unit: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, text, labels, unit, buckets)


# As advised by the conventions for gen_ai.server.*; the other buckets are Baton's.
DURATION_BUCKETS = tuple(0.01 * 2**n for n in range(14))
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,
    0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCH_BUCKETS = tuple(float(2**n) for n in range(9))
COPY_BUCKETS = (0.0001, 0.00025, 0.0005, *STEP_BUCKETS)
RATE_BUCKETS = (0.001, 0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
SHARE_BUCKETS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)

READINGS_AGE = _gauge(
    "baton.readings.age",
    "Age of the values that only one thread can read; above 0 while that thread is busy.",
    unit="s",
)

# --- Router, per request ----------------------------------------------------------------------

_CALL = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_response_model")
DURATION = _histogram(
    "gen_ai.server.request.duration",
    "Time from the arrival of a request at the router to its end.",
    "s",
    DURATION_BUCKETS,
    *_CALL,
    "error_type",
)
TIME_TO_FIRST_TOKEN = _histogram(
    "gen_ai.server.time_to_first_token",
    "Time from the arrival of a request at the router to its first token.",
    "s",
    FIRST_TOKEN_BUCKETS,
    *_CALL,
)
TIME_PER_TOKEN = _histogram(
    "gen_ai.server.time_per_output_token",
    "Mean time between the tokens of an answer, without the first token.",
    "s",
    PER_TOKEN_BUCKETS,
    *_CALL,
)
QUEUE_WAIT = _histogram(
    "baton.queue.wait", "Time that requests waited for admission.", "s", FIRST_TOKEN_BUCKETS
)
REQUESTS = _counter(
    "baton.requests",
    "Ended requests by outcome; served is where the prompt was computed.",
    "outcome",
    "served",
)
REFUSALS = _counter(
    "baton.refusals", "Requests refused before any work was done for them, by reason.", "reason"
)
TOKENS = _counter(
    "baton.tokens",
    "Prompt tokens of dispatched requests and answer tokens sent to clients, by outcome of the "
    "request.",
    "kind",
    "outcome",
)
ATTEMPTS = _counter(
    "baton.attempts",
    "Attempts to serve a request: the first, a retry from the start, or a migration, which "
    "continues a partial answer.",
    "kind",
)
SUSPECTS = _counter(
    "baton.suspects",
    "Attempts that ended with the engine of their node or with a failed pass, by verdict on the "
    "request: bystander or suspect, which are retried, or poison.",
    "verdict",
)
REQUEST_KV_BYTES = _counter(
    "baton.request.kv_bytes",
    "KV transferred for requests, as reported by their decode nodes.",
    unit="By",
)

# --- Router, current state --------------------------------------------------------------------

QUEUE_DEPTH = _gauge("baton.queue.depth", "Requests that wait for admission.")
IN_FLIGHT = _gauge("baton.requests.in_flight", "Requests dispatched to nodes and not ended.")
OPEN_NODES = _gauge("baton.nodes.open", "Nodes that accept requests.", "role")
TRACES_LOST = _counter(
    "baton.traces.lost", "Traces lost because the queue was full or the export failed."
)

# --- Nodes --------------------------------------------------------------------------------------

STEP = _histogram("baton.step", "Time that the model ran in a step.", "s", STEP_BUCKETS)
BATCH = _histogram("baton.step.requests", "Number of requests in a step.", "", BATCH_BUCKETS)
SILENCE = _gauge("baton.engine.silence", "Time since the last progress of the engine.", unit="s")
RANKS = _gauge("baton.ranks", "Processes of the node, each with a part of the model.")
COLLECTIVES = _counter(
    "baton.collectives",
    "Time in which passes exchanged numbers between processes of the node, or waited for them.",
    unit="s",
)
PROMPT_TOKENS_COMPUTED = _counter(
    "baton.prompt_tokens.computed",
    "Prompt tokens computed by the model; about 0 on decode nodes.",
    "role",
)
SAMPLED_TOKENS = _counter("baton.tokens.sampled", "Sampled tokens.")
PASSES = _counter(
    "baton.passes",
    "Forward passes. launch: graph, or the reason why no graph of a GPU was replayed.",
    "launch",
)
SPECULATED_TOKENS = _counter(
    "baton.tokens.speculated",
    "Tokens proposed by speculative decoding, and those accepted.",
    "kind",
)
DRAFTS_PROPOSED = _counter(
    "baton.draft_tokens.proposed", "Draft tokens proposed, by position in the draft.", "position"
)
DRAFTS_ACCEPTED = _counter(
    "baton.draft_tokens.accepted", "Draft tokens accepted, by position in the draft.", "position"
)
PICTURES = _counter(
    "baton.pictures",
    "Pictures of prompts that were encoded, whose encodings were found in memory, or read from "
    "the KV cache.",
    "kind",
)
ENCODER_ROWS = _gauge("baton.encoder.rows", "Rows of encodings of pictures in memory.")
HANDOFFS = _counter(
    "baton.handoffs",
    "Ended hand-offs and pulls. direction: sent or received; pulled by this node, or given to a "
    "node that pulled.",
    "direction",
    "outcome",
)
KV_BYTES = _counter(
    "baton.kv.bytes",
    "KV of completed hand-offs and pulls.",
    "direction",
    "transport",
    unit="By",
)
TRANSFER = _histogram(
    "baton.kv.transfer",
    "Time from the first order of a hand-off or pull to its end.",
    "s",
    STEP_BUCKETS,
    "direction",
)
RATE = _histogram(
    "baton.kv.rate",
    "Transfer rate of a hand-off, from its first write to its last.",
    "GBy/s",
    RATE_BUCKETS,
)
OVERLAP = _histogram(
    "baton.kv.overlap",
    "Share of a hand-off's bytes transferred before its prompt was fully computed.",
    "1",
    SHARE_BUCKETS,
)
STAGED_BYTES = _counter(
    "baton.kv.staged.bytes",
    "KV copied between a GPU and pinned host memory for hand-offs and pulls, where UCX cannot "
    "access the GPU or the blocks of a peer differ. direction: sent, out of the GPU, or received.",
    "direction",
    unit="By",
)
STAGED_COPY = _histogram(
    "baton.kv.staged.copy",
    "Time that such a copy delayed a hand-off: from its begin until its end was seen.",
    "s",
    COPY_BUCKETS,
    "direction",
)
RUNNING = _gauge("baton.requests.running", "Requests in the batch.")
WAITING = _gauge(
    "baton.requests.waiting",
    "Waiting requests by status: queued, waiting for remote KV or a grammar, or ready.",
    "status",
)
BLOCKS = _gauge(
    "baton.kv.blocks",
    "KV blocks by state, each counted once. cached: unused, but can be a prefix hit; granted: "
    "writable by a peer; fenced: possibly still written by a lost peer.",
    "state",
)
GROUP_BLOCKS = _gauge(
    "baton.kv.group.blocks",
    "KV blocks that requests hold, by KV group, such as 0 full or 1 window 512, or for their "
    "recurrent states. A shared block counts for each request.",
    "group",
)
GROUP_HITS = _counter(
    "baton.kv.group.hits", "KV blocks of prefix hits, by KV group; of states: snapshots.", "group"
)
GROUP_EVICTIONS = _counter(
    "baton.kv.group.evictions", "KV blocks removed from the prefix cache, by KV group.", "group"
)
PREEMPTIONS = _counter(
    "baton.preemptions", "Preempted requests, whose blocks were freed for others."
)
PREFIX_TOKENS = _counter(
    "baton.prefix.tokens",
    "Prompt tokens looked up in the prefix cache, and those found.",
    "kind",
)
OPEN_HANDOFFS = _gauge(
    "baton.handoffs.open", "Open hand-offs, whose blocks can still be written or read.", "direction"
)
DIGEST_MISMATCHES = _counter(
    "baton.kv.digest_mismatches", "Hand-offs whose received bytes differ from the sent ones."
)
LINKS = _gauge("baton.kv.links", "Control links to peers, by state.", "state")
LINKS_CUT = _counter("baton.kv.links_cut", "Control links to peers that ended, for any reason.")
MESSAGES_DROPPED = _counter(
    "baton.kv.messages_dropped", "Late or duplicate messages of peers, which are ignored."
)
CONNECTOR_ERRORS = _counter("baton.kv.connector.errors", "Errors of the KV connector.")
TIER_BLOCKS = _gauge("baton.kv.tier.blocks", "KV blocks in a tier below the KV cache.", "tier")
TIER_BYTES = _gauge("baton.kv.tier.bytes", "Bytes of KV in a tier.", "tier", unit="By")
TIER_LIMIT = _gauge("baton.kv.tier.limit", "Limit of the KV in a tier.", "tier", unit="By")
TIER_TOKENS = _counter(
    "baton.kv.tier.tokens", "Prompt tokens whose KV was loaded from a tier.", "tier"
)
TIER_LOADED = _counter("baton.kv.tier.loaded", "KV blocks loaded from a tier.", "tier")
TIER_STORED = _counter("baton.kv.tier.stored", "KV blocks stored to a tier.", "tier")
TIER_EVICTED = _counter("baton.kv.tier.evicted", "KV blocks evicted from a tier.", "tier")
TIER_FAILED = _counter(
    "baton.kv.tier.failed",
    "KV blocks that a tier failed to load or store, or had no room for in its queue.",
    "tier",
)
TIER_LOAD = _histogram(
    "baton.kv.tier.load",
    "Time that a tier took for its blocks of a load.",
    "s",
    STEP_BUCKETS,
    "tier",
)
TIER_RETAINED = _gauge("baton.kv.tier.retained", "KV blocks that a tier must not evict.", "tier")
TIER_REFUSED = _counter(
    "baton.kv.tier.refused_retentions",
    "KV blocks that a request wanted to retain while too many of the tier were.",
    "tier",
)
TIER_USABLE = _gauge(
    "baton.kv.tier.usable", "1, or 0 while a tier does not work and the node does without.", "tier"
)
PULL_BLOCKS = _counter(
    "baton.kv.pull.blocks",
    "KV blocks that this node pulled from others instead of computing them: landed, or failed.",
    "outcome",
)
FOREIGN_BYTES = _counter(
    "baton.kv.foreign.bytes", "Bytes of KV that were read from vLLM servers.", unit="By"
)
FOREIGN_BLOCKS = _counter(
    "baton.kv.foreign.blocks",
    "KV blocks that were to be filled from vLLM servers: filled, or failed.",
    "outcome",
)
FOREIGN_FAILURES = _counter(
    "baton.kv.foreign.failures",
    "Failed pulls of KV from vLLM servers: unreachable, refused, expired, read, or late.",
    "reason",
)
ADAPTERS = _gauge(
    "baton.adapters",
    "LoRA adapters of a node. state: named, in_memory, in_use by requests, or reading from files.",
    "state",
)
ADAPTER_BYTES = _gauge("baton.adapters.memory", "Memory of LoRA adapters.", unit="By")
ADAPTER_WAITING = _gauge(
    "baton.adapters.waiting",
    "Requests that wait until their LoRA adapter is in memory: for a place there, or for the load.",
    "cause",
)
ADAPTER_LOAD = _histogram(
    "baton.adapters.load",
    "Time to read a LoRA adapter into memory.",
    "s",
    STEP_BUCKETS,
)
ADAPTER_FAILURES = _counter("baton.adapters.failed_loads", "LoRA adapters that cannot be read.")
ADAPTER_EVICTIONS = _counter(
    "baton.adapters.evictions", "LoRA adapters that were removed from memory for others."
)
TRANSPORT = _gauge("baton.kv.transport", "1 for the KV transport in use.", "transport")

METRICS = tuple(value for value in globals().values() if isinstance(value, Metric))
BY_PROMETHEUS_NAME = {metric.prometheus: metric for metric in METRICS}
