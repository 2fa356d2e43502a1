"""The run loop: which stage runs when, and what the user sees."""
