"""Prefill leg: a prompt becomes KV on a decode node, and a first token.

1. The router sends the order to a prefill node and, at the same time, one with the same hand-off id
   to a decode node, which grants blocks (`decode_node`).
2. The scheduler computes the prompt in chunks beside other requests (`engine/scheduler`). Requests
   that have a grant go first.
3. After each pass, or each layer, the KV worker writes the new blocks into the granted ones
   (`engine/kv_arrival/sends.py` decides, `kv_transfer/protocol/sender.py` speaks to the peer).
4. The request ends with its first token, which goes to the router and, with the last block, to the
   decode node. The call ends with the last write: until then, a router that cancels the call
   withdraws the hand-off (`prefill_node/leg.py`).
"""
