"""Pure functions from parameters and batches to gradients."""
