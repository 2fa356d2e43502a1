"""MLflow: what is published of a run, and the process that does it."""
