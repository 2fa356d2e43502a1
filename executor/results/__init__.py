"""What a run computed, as tables and metrics."""
