"""Size limits of gRPC messages, the same for servers and clients."""

from __future__ import annotations

# Enough for a prompt of 13 million token ids. Requests whose answers would be larger are refused
# early (`router/input_processing/limits.py`).
MAX_MESSAGE_BYTES = 64 << 20
# Limit for clients' requests. Empty messages in lists take 30 times their bytes once parsed.
MAX_REQUEST_BYTES = 8 << 20
# A message batches events of many calls. A full batch plus one event fits MAX_MESSAGE_BYTES.
MAX_BATCH_BYTES = 1 << 20
MAX_EVENT_BYTES = MAX_MESSAGE_BYTES - 2 * MAX_BATCH_BYTES
# Vectors of the tokens of a text, and of all texts of a client's request.
MAX_VECTORS_BYTES = 32 << 20
