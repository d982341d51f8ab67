"""Job files for schedulers: written, never submitted."""
