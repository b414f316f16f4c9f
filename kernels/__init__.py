"""Tensor operations: a plain reference for each, and faster ones per device."""
