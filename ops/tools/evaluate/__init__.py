"""What `dflow evaluate` runs."""
