"""The contract's stubs, generated from `protos/baton/v1/` by `protos/generate.py`."""
