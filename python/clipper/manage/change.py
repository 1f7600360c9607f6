"""The result of an operation of management."""

import msgspec

from clipper.store.history import Changed


class Change(msgspec.Struct):
    """Result of a verb, or of its dry run. message: one line. warning: one line on what may not be
    as it should, or empty. changed: the records before and after; empty when nothing changed.
    """

    verb: str
    message: str = ""
    warning: str = ""
    dry_run: bool = False
    changed: tuple[Changed, ...] = ()
