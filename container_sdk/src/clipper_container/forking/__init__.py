"""Replicas that are forked from a process which has imported their frameworks.

Imports nothing but the standard library, so that the thread limits can be set before numpy.
"""

from typing import Any

Message = dict[str, Any]  # of JSON, between a deployer, its fork servers and their replicas
