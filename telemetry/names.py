"""Every name under which something is told of a request: spans, attributes, headers.

`gen_ai.*`, `rpc.*` and `error.type` are OpenTelemetry's conventions; where these have no name, ours
begin with `baton.`.
"""

from __future__ import annotations

SCOPE = "baton"

# --- Spans ---------------------------------------------------------------------------------

GENERATE = "generate"  # router, from the call to its end
ADMIT = "admit"  # until it is its turn
ROUTE = "route"  # choosing the nodes, until the first is called
RETRY = "retry"  # another try, of which the client has no token yet
MIGRATE = "migrate"  # another try that goes on where the answer broke off
PREFILL = "prefill"  # the prefill leg, told by the router and by the node
PREFILL_WAIT = "prefill_wait"  # until its first chunk runs
PREFILL_COMPUTE = "prefill_compute"
KV_PUSH = "kv_push"  # from the first block ordered to the last write ended
DECODE = "decode"  # the decode leg, told by the router and by the node
KV_WAIT = "kv_wait"  # blocks granted until their KV is there
DECODE_WAIT = "decode_wait"  # until blocks are there, or a place in the batch
DECODE_COMPUTE = "decode_compute"
ENGINE_STEP = "engine_step"  # a trace of its own, linked to the requests that were in the step

SPANS = (
    *(GENERATE, ADMIT, ROUTE, RETRY, MIGRATE),
    *(PREFILL, PREFILL_WAIT, PREFILL_COMPUTE, KV_PUSH),
    *(DECODE, KV_WAIT, DECODE_WAIT, DECODE_COMPUTE),
    ENGINE_STEP,
)

# --- Events inside spans ---------------------------------------------------------------------

TOKENIZED = "tokenized"
CHOSEN = "chosen"
FIRST_TOKEN = "first_token"
CHUNK = "chunk"
PREEMPTED = "preempted"
LEG_FAILED = "leg_failed"
JUDGED = "judged"  # an engine ended, or a pass failed, with the request: is it at fault?

# --- Attributes, by convention ---------------------------------------------------------------

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.response.status_code"
ERROR_TYPE = "error.type"
ERROR_MESSAGE = "exception.message"
SERVER_ADDRESS = "server.address"

# --- Attributes, ours ------------------------------------------------------------------------

OUTCOME = "baton.outcome"  # ok, cancelled, refused, failed or deadline_exceeded
SERVED = "baton.served"  # remote, local or migrated
SERVED_REASON = "baton.served.reason"
ROLE = "baton.role"  # router, prefill or decode; beside the resource's, which some viewers drop
NODE = "baton.node.id"
INCARNATION = "baton.node.incarnation"
ATTEMPT = "baton.attempt"
ATTEMPTS = "baton.attempts"
QUEUE_POSITION = "baton.queue.position"
QUEUE_WAIT = "baton.queue.wait"
POLICY = "baton.route.policy"
CANDIDATES_PREFILL = "baton.route.candidates.prefill"
CANDIDATES_DECODE = "baton.route.candidates.decode"
CHOSEN_PREFILL = "baton.route.chosen.prefill"
CHOSEN_DECODE = "baton.route.chosen.decode"
PREDICTED_HIT_TOKENS = "baton.route.predicted_hit_tokens"
ROUTE_REASON = "baton.route.reason"
VERDICT = "baton.verdict"  # bystander, suspect or poison
WAIT_FOR = "baton.wait_for"  # blocks or batch
TOKENS = "baton.tokens"
CACHED_TOKENS = "baton.tokens.cached"
PRIOR_TOKENS = "baton.tokens.prior"  # of the answer, given by an earlier try
STEP_S = "baton.step.duration"
STEPS = "baton.steps"
PREEMPTIONS = "baton.preemptions"
TIME_PER_TOKEN = "baton.time_per_token"
STEP_NUMBER = "baton.step.number"  # since the engine began
STEP_ROWS = "baton.step.rows"  # requests in it, traced or not
STEP_PREFILL_TOKENS = "baton.step.tokens.prefill"  # of prompts
STEP_DECODE_TOKENS = "baton.step.tokens.decode"
STEP_LINKS_LEFT_OUT = "baton.step.links_left_out"  # beyond the most that a span has
# How long the parts of a step took, in seconds and in their order; together they are all of it.
STEP_SCHEDULE = "baton.step.schedule"
STEP_ORDERS = "baton.step.orders"  # the hand-offs' worker is told what to move
STEP_RUN = "baton.step.run"
STEP_POLL = "baton.step.poll"  # what the wire has done meanwhile
STEP_UPDATE = "baton.step.update"
STEP_PARTS = (STEP_SCHEDULE, STEP_ORDERS, STEP_RUN, STEP_POLL, STEP_UPDATE)
KV_BYTES = "baton.kv.bytes"
KV_BLOCKS = "baton.kv.blocks"
KV_DESCRIPTORS = "baton.kv.descriptors"
KV_WRITES = "baton.kv.writes"
KV_TRANSPORT = "baton.kv.transport"
KV_RATE = "baton.kv.gigabytes_per_second"
KV_OVERLAP = "baton.kv.overlap"
KV_PEER = "baton.kv.peer"
KV_VERIFIED = "baton.kv.verified"

# --- Resource --------------------------------------------------------------------------------

SERVICE_NAME = "service.name"
SERVICE_VERSION = "service.version"
SERVICE_INSTANCE = "service.instance.id"
PROCESS_ID = "process.pid"

# --- gRPC metadata -----------------------------------------------------------------------------

TRACEPARENT = "traceparent"
# The span that the router names beforehand: the prefill node gives the push this id, and the
# decode node links its wait to it.
KV_PUSH_SPAN = "baton-kv-push-span"
