"""Attention, decode and log-probability kernels for JAX."""
