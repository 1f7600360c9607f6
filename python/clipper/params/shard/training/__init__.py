"""Training: gradients that are applied at once, or in steps of several workers."""
