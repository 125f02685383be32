"""The names of all that is counted, with what they mean, and the buckets of the histograms."""

from __future__ import annotations

# --- The router's, of each request: by OpenTelemetry's conventions, as Prometheus writes them ---

DURATION = "gen_ai_server_request_duration_seconds"
TIME_TO_FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"
TIME_PER_TOKEN = "gen_ai_server_time_per_output_token_seconds"
QUEUE_WAIT = "baton_queue_wait_seconds"
REQUESTS = "baton_requests"
REFUSALS = "baton_refusals"
TOKENS = "baton_tokens"
ATTEMPTS = "baton_attempts"
AGAIN = "baton_further_attempts"
REQUEST_KV_BYTES = "baton_request_kv_bytes"

# --- The router's, at the moment ---------------------------------------------------------------

QUEUE_DEPTH = "baton_queue_depth"
IN_FLIGHT = "baton_requests_in_flight"
OPEN_NODES = "baton_nodes_open"
TRACES_LOST = "baton_traces_lost"

# --- The nodes' ----------------------------------------------------------------------------------

STEP = "baton_step_seconds"
BATCH = "baton_step_requests"
PROMPT_TOKENS_COMPUTED = "baton_prompt_tokens_computed"
HANDOFFS = "baton_handoffs"
KV_BYTES = "baton_kv_bytes"
TRANSFER = "baton_kv_transfer_seconds"
RATE = "baton_kv_gigabytes_per_second"
OVERLAP = "baton_kv_overlap_share"
RUNNING = "baton_requests_running"
WAITING = "baton_requests_waiting"
BLOCKS = "baton_kv_blocks"
PREEMPTIONS = "baton_preemptions"
PREFIX_TOKENS = "baton_prefix_tokens"
OPEN_HANDOFFS = "baton_handoffs_open"
DIGEST_MISMATCHES = "baton_kv_digest_mismatches"
CUT_PAIRS = "baton_kv_links_cut"
LINKS = "baton_kv_links_up"

TOTALS = frozenset(
    {PREEMPTIONS, PREFIX_TOKENS, DIGEST_MISMATCHES, CUT_PAIRS, TRACES_LOST},
)
LABELS = {
    OPEN_NODES: "role",
    WAITING: "status",
    BLOCKS: "state",
    PREFIX_TOKENS: "kind",
    OPEN_HANDOFFS: "direction",
}
HELP = {
    DURATION: "From a request's arrival at the router to its end.",
    TIME_TO_FIRST_TOKEN: "From a request's arrival at the router to its first token.",
    TIME_PER_TOKEN: "Between the tokens of an answer after the first, on average.",
    QUEUE_WAIT: "How long requests waited for their turn.",
    REQUESTS: "Requests that ended, and how; served says where the prompt was computed.",
    REFUSALS: "Requests that were refused before any node was asked, by reason.",
    TOKENS: "Tokens of prompts and of answers, of requests that ended well.",
    ATTEMPTS: "Tries to serve a request, the first included.",
    AGAIN: "Tries after the first: retry from the start, migrate from where it broke off.",
    REQUEST_KV_BYTES: "KV that was handed over for requests, as their decode nodes told.",
    QUEUE_DEPTH: "Requests that wait for their turn.",
    IN_FLIGHT: "Requests that nodes work on.",
    OPEN_NODES: "Nodes that can be given requests.",
    TRACES_LOST: "Traces that went nowhere, for want of room or of a collector.",
    STEP: "How long the model ran in a step.",
    BATCH: "How many requests took part in a step.",
    PROMPT_TOKENS_COMPUTED: "Prompt tokens that were run through the model; on decode about 0.",
    HANDOFFS: "Hand-offs that ended.",
    KV_BYTES: "KV bytes that were written or received.",
    TRANSFER: "From the first order of a hand-off to its end.",
    RATE: "Speed of a hand-off's writes, from the first to the last.",
    OVERLAP: "Share of a hand-off's bytes that had landed before its prompt was computed.",
    RUNNING: "Requests in the batch.",
    WAITING: "Requests that wait: in line, for KV of a peer, or with KV for a place in the batch.",
    BLOCKS: "KV blocks: all, free (cached ones that nobody uses among them) and fenced.",
    PREEMPTIONS: "Requests that lost their blocks to others.",
    PREFIX_TOKENS: "Prompt tokens that were looked up in the prefix cache, and those found.",
    OPEN_HANDOFFS: "Hand-offs whose blocks may still be written or read.",
    DIGEST_MISMATCHES: "Hand-offs whose bytes were not those that were sent.",
    CUT_PAIRS: "Links to peers that were cut.",
    LINKS: "Peers that are linked.",
}

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
