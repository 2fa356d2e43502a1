"""What decides a node's key: its config, its code, its inputs and the files that it names."""
