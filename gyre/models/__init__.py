"""Pure forward passes over a parameter pytree."""
