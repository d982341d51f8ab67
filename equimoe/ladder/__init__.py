"""The scaling ladder: laws from small runs, what they predict of a large one, and how sure that is. No JAX."""
