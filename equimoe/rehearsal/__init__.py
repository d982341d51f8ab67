"""What does not run here, tried: the step on devices that are not there, tokens on their way, a run with its faults."""
