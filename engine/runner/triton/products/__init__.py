"""Matrices and experts in Triton: weights of 4, 8 and 16 bits, routing."""
