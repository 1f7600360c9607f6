"""Replicas as containers of Docker or podman, and the images of models."""
