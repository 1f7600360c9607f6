"""The arithmetic of policies and of models that learn online."""
