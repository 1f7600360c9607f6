"""Running models: engines, containers, scaling, caches and parameter rows."""
