"""Texts without the secrets that URLs hold: for messages, logs and everything that is shown."""

import re
from typing import Final

_HIDDEN: Final = "***"
_LOGIN = re.compile(r"(?<=://)[^\s/?#]*@")
# A password that should have been quoted: it holds a slash, a question mark or a number sign, and
# what comes before is no host with a port.
_LOGIN_UNQUOTED = re.compile(r"(?<=://)[^\s/?#:@\[]*:(?!\*\*\*@|\d*(?:[/?#,\s]|$))[^\s]*@")
_OPTION = re.compile(
    r"([?&;][\w.~-]*(?:password|passwd|secret|token|api_?key|access_?key|signature|credential|\bsig)"
    r"[\w.~-]*=)[^&#\s]+",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """Return the text with `***` in place of what URLs in it should keep to themselves: passwords
    before the host, and options whose name says that they are a password, a token or a key.

    A name before a password stays; a login without a password is hidden, because it may be a token.
    """
    if "://" not in text:
        return text
    for pattern in (_LOGIN, _LOGIN_UNQUOTED):
        text = pattern.sub(_hide_login, text)
    return _OPTION.sub(rf"\1{_HIDDEN}", text)


def _hide_login(found: re.Match[str]) -> str:
    name, colon, _ = found[0].partition(":")
    return f"{name}:{_HIDDEN}@" if colon else f"{_HIDDEN}@"
