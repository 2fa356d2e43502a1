"""What a store keeps, removes, and exchanges with a remote."""
