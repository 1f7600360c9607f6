"""How requests come in from outside this process."""
