"""What a run needs before it is started: parameters, tokens, rates, FLOPs, bytes."""
