"""The shell: `clipper VERB`. A module for the verbs of each kind; `main` is all of them."""

from clipper.cli.shell import main

__all__ = ["main"]
