"""Replicas as processes on this machine: forked, or started from a command line."""
