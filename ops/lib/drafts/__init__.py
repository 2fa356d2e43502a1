"""The draft models: their attention, losses, decoding, and a folder for each algorithm."""
