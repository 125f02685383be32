"""How large a gRPC message may be, on all sides."""

from __future__ import annotations

# Holds a prompt of 13 million token ids. `router/sizes.py` refuses what could be larger.
MAX_MESSAGE_BYTES = 64 << 20
# What a client may send at once. Empty messages in lists take 30 times their bytes once parsed.
MAX_REQUEST_BYTES = 8 << 20
# Events of many calls share a message: with all that fits and one more it is no larger than above.
MAX_BATCH_BYTES = 1 << 20
MAX_EVENT_BYTES = MAX_MESSAGE_BYTES - 2 * MAX_BATCH_BYTES
