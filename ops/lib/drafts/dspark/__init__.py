"""DSpark (DeepSeek, arXiv 2607.05147): the logits of a slot get a bias that knows the token before it.

With e = w1[token before], a slot's logits are h W^T + e w2^T: both tables have one row a token, of low rank. A second
head says of each proposal how probably it is accepted.
"""
