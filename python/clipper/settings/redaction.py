"""A representation of settings that hides secrets."""

import msgspec


def redacted(settings: msgspec.Struct, *secrets: str) -> str:
    """Return the representation of a Struct with `***` in place of the named fields' values."""
    items = msgspec.structs.asdict(settings).items()
    shown = (f"{key}={'***' if key in secrets and value else repr(value)}" for key, value in items)
    return f"{type(settings).__name__}({', '.join(shown)})"
