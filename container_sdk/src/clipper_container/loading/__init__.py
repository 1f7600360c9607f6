"""Loading: what a target or a model file is, and the model that it holds."""
