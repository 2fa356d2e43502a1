"""Paired measurements that print their figures beside the goals; docs/benchmarks.md says how to run them."""
