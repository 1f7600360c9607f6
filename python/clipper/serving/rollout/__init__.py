"""Rollouts and roles: traffic splits, guards, canaries, shadows and decoys."""
