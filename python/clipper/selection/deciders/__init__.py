"""Deciders: when a query is answered, and with which predictions."""
