"""The architecture of the 535B-A23B run as typed Equinox modules; `transformer` puts the parts together."""
