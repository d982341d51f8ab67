"""What a run is expected to do, from smaller ones and from itself: laws, predictions, monitors. No JAX."""
