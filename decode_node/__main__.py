"""`python -m baton.decode_node`, which names the command to use."""

raise SystemExit("use `baton serve decode`, which has the options")
