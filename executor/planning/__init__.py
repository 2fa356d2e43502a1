"""Which nodes run, and why; what a command starts from."""
