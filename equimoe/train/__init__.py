"""The training run: state, step, metrics, checkpoints, loop."""
