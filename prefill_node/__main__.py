"""`python -m baton.prefill_node`, which names the command to use."""

raise SystemExit("use `baton serve prefill`, which has the options")
