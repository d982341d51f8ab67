"""What a run is expected to do: laws from small runs, predictions, and monitors of a run that goes. No JAX."""
