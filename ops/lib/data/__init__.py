"""Shards of tokens, packs of images, files and counts of samples."""
