"""What serves a command of dflow, and no op."""
