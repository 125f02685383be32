"""Decode leg: KV that a prefill node writes becomes the rest of an answer.

1. The router names the prefill node in its order. Links to prefill nodes are opened when the router
   first sees a pair (`decode_node/peer_warmup.py`), else by the first hand-off.
2. The request waits in `WAITING_FOR_REMOTE_KVS`: as soon as there is room, the scheduler allocates
   the blocks that the prefix cache and the tiers lack, and grants them to the prefill node
   (`engine/kv_arrival/receives.py` decides, `kv_transfer/protocol/receiver.py` speaks to the peer).
3. Blocks land while the prompt is still computed. With the last one comes the first token: the
   request joins the batch and decodes (`engine/scheduler`, `engine/runner`).
4. If the KV does not arrive, the node computes the prompt itself, or the call fails and the router
   tries other nodes (`kv-load-failure-policy`).
"""
