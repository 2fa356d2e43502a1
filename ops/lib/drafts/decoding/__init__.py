"""Plain and speculative decoding, one prompt or a batch."""
