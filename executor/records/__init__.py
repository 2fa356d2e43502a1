"""The record of a run: its graph, states, events and tags."""
