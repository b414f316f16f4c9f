"""Joins engine, KV arena and broker: a worker process."""
