"""What every training needs: optimizers, checkpoints, ranks."""
