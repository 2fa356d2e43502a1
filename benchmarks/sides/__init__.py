"""What is measured: one module a side, each run as a fresh process (`python -m benchmarks.sides.dense --help`)."""
