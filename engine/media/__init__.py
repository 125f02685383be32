"""Pictures in prompts: which are encoded when, and whose encodings stay in memory. Pure."""
