"""Parts of the runner in Triton, for GPUs. Nothing here is imported unless it is asked for."""
