"""Images as a target takes them: processors, families and batches."""
