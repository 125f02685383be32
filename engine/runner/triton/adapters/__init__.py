"""Products of LoRA adapters in Triton."""
