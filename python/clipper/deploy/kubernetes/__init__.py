"""A Helm chart and its values, manifests for Kubernetes that it renders, and Docker Compose."""
