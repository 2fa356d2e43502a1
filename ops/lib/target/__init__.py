"""The frozen target: its sizes, its two ends, its forward pass, and shards of its features."""
