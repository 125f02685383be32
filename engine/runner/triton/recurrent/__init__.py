"""Recurrent layers in Triton: gated delta rule and Mamba2."""
