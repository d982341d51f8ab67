"""Devices: what they can do, the mesh, and the transports that carry tokens to experts and back."""
