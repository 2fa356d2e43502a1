"""What all drafts share: the backbone, its config, the training step, the slow reference, and the serving contract."""
