"""The training harness: adapter protocol, trainer, sampler, metrics, checkpoints."""
