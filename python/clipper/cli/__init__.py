"""The command line: one module per topic; `main` combines them."""

from clipper.cli.shell import main

__all__ = ["main"]
