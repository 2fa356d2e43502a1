"""How a stage's processes are started, watched and ended."""
