"""What commands do with a run's target and draft: serve, compare, diagnose."""
