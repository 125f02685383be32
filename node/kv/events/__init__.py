"""KV events of a node for other routers, in vLLM's format."""
