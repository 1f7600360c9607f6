"""The built-in policies: one model, ensembles, bandits and experts."""
