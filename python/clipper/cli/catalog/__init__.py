"""Commands for models, applications and their queries."""
