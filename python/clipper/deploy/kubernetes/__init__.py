"""Manifests for Kubernetes and Docker Compose, and a Helm chart."""
