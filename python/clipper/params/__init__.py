"""Parameter server: embedding tables and dense variables that are trained and served at once.

`Client` is what a worker, or a model that serves, connects with; docs/params.md explains the rest.
"""

from clipper.params.client.client import Client
from clipper.params.tables import TableSpec

__all__ = ["Client", "TableSpec"]
