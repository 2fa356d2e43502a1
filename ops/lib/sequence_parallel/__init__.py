"""Sequence parallelism: exchanges between ranks that share a sequence."""
