"""Access: API keys, management tokens, and the user of a local client."""
