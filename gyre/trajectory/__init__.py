"""From recorded calls to training samples; pure, without JAX."""
