"""The measured sides: one module each, run as a fresh process (`python -m benchmarks.sides.dense --help`)."""
