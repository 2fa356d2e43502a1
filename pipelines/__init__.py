"""Pipelines to run as they are, or to start from: TOML files, and one Python twin."""
