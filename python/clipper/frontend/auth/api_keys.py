"""API keys for queries (`http.api_keys_file`) and named tokens of managers (`http.tokens_file`)."""

import hmac

from clipper.credential_file import CredentialFile
from clipper.errors import NotAllowed

_SCHEME = b"bearer "


class ApiKeys:
    """The keys of one file. Threads: any.

    token: the management token, which is always valid; empty for none. Raises ConfigError for a
    file that cannot be read, or has a line of another form.
    """

    def __init__(self, path: str, token: str = "", setting: str = "http.api_keys_file") -> None:
        self._token = f"Bearer {token}".encode() if token else b""
        self._file = CredentialFile(path, setting)

    def refresh(self) -> bool:
        """Reload the file if it has changed; return whether new keys are in use."""
        return self._file.refresh()

    def check(self, authorization: bytes) -> str:
        """Return the name of the key's owner; empty for the management token.

        authorization: the value of the header. Raises NotAllowed for an unknown or missing key.
        """
        if self._token and hmac.compare_digest(authorization, self._token):
            return ""
        if authorization[: len(_SCHEME)].lower() == _SCHEME:
            found = self._file.find(authorization[len(_SCHEME) :].strip())
            if found is not None:
                return found.name
        wrong = "the key is not known here" if authorization else "this server requires a key"
        raise NotAllowed(
            f"{wrong}.", hint="Send Authorization: Bearer KEY; `clipper key NAME` makes one."
        )
