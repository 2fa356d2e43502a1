"""The DFlash draft: model, config, training step, reference and serving contract."""
