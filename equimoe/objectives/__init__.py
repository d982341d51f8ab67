"""What is minimised. One module an objective."""
