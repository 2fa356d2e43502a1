"""Attention of blocks over [context | block]: the definition and its fast paths."""
