"""Errors of a pull."""

from __future__ import annotations

import os

from clipper_container.loading.errors import LoadError

TEXT_MAX = 300
_SECRETS = ("SECRET", "TOKEN", "PASSWORD", "CREDENTIAL", "SERVICE_ACCOUNT_KEY")
_SECRET_CHARS_MIN = 8


class PullError(LoadError):
    """A model's files could not be pulled. url: of the model; cause; hint: the next command.

    is_final: another host, or another try, has no other result.
    """

    def __init__(self, url: str, cause: str, hint: str = "", is_final: bool = True) -> None:
        super().__init__(f"cannot pull {url}: {cause}.{' ' if hint else ''}{hint}")
        self.url, self.cause, self.hint, self.is_final = url, cause, hint, is_final


class Interrupted(Exception):
    """A transfer broke off, and can be tried again."""


class ContentChanged(Exception):
    """The remote file is another one than when it was listed."""


def shown(error: BaseException) -> str:
    """Return the first line of an error's text, without values of secret variables."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    for name, value in os.environ.items():
        if len(value) >= _SECRET_CHARS_MIN and any(word in name.upper() for word in _SECRETS):
            text = text.replace(value, "***")
    return text[:TEXT_MAX].rstrip(" .:")
