"""Sequence parallelism: what ranks that share a sequence exchange."""
