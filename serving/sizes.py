"""How large a gRPC message may be, on all sides."""

from __future__ import annotations

# Holds a prompt of 13 million token ids. `router/sizes.py` refuses what could be larger.
MAX_MESSAGE_BYTES = 64 << 20
