"""Notebooks: objects as HTML, and cells that are run again. The first `clipper.start` of a session
of IPython turns both on."""
