"""Descriptions of settings beside their types: meaning, unit and range. The tables in
docs/configuration.md are generated from them.
"""

from msgspec import Meta


def about(text: str, unit: str = "", ge: float | None = None, le: float | None = None) -> Meta:
    """Return the description of a setting, with its unit and its range."""
    return Meta(description=text, extra={"unit": unit}, ge=ge, le=le)
