"""Access: API keys, management tokens, CORS, and the user of a local client."""
