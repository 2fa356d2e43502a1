"""vLLM as a server for a draft: its version, and its command. Nothing here loads it."""
