"""A representation of settings that hides secrets."""

from typing import Final

import msgspec

from clipper.errors import without_secrets

SECRETS: Final = frozenset(("token", "headers"))  # settings whose values are shown nowhere


def shown(key: str, value: object) -> object:
    """Return the value of a setting as it may be shown: `***` for a secret, and a URL without its
    password."""
    if key in SECRETS and value:
        return "***"
    return without_secrets(value) if isinstance(value, str) else value


def redacted(settings: msgspec.Struct) -> str:
    """Return the representation of a Struct of settings without its secrets."""
    fields = ", ".join(
        f"{key}={'***' if key in SECRETS and value else repr(shown(key, value))}"
        for key, value in msgspec.structs.asdict(settings).items()
    )
    return f"{type(settings).__name__}({fields})"
