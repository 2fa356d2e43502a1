"""Trials of a training, of which the worse ones stop early: the points, the decision, and its results."""
