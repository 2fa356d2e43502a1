"""`dflow init`: a pipeline for a user's own data."""
