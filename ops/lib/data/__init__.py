"""Shards of tokens, packs of images, files and the account of samples."""
