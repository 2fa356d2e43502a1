"""A draft algorithm of a user's own: beside the target's head, every slot has a bias for each token."""
