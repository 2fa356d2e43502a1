"""Anchors, the frozen head tile by tile, and the losses."""
