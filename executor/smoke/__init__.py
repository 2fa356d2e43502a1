"""A trial run on a few samples, and the estimate of the full run."""
