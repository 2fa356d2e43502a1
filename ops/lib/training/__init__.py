"""Parts shared by all trainings: optimizers, checkpoints, ranks."""
