"""What a run is expected to do, from smaller runs and from itself: laws, predictions, monitors. Plain Python, no JAX."""
