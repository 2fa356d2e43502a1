"""Paired measurements that print their figures beside the goals; docs/benchmarks.md describes how to run them."""
