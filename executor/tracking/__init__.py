"""MLflow: publishing runs, and the process that does it."""
