"""vLLM servers that compute prompts: their API, health and load, and checks of their KV."""
