"""Commands that show what a server does."""
