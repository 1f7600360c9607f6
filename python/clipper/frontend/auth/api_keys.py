"""API keys for queries (`http.api_keys_file`) and named tokens of managers (`http.tokens_file`)."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from clipper.credentials.credential_file import CredentialFile
from clipper.errors import NotAllowed
from clipper_core.http.key_table import KeyTable


class _Known(NamedTuple):
    """The keys of a file as it was read. names: of their owners, by the numbers of the table."""

    table: KeyTable
    names: list[str]


class ApiKeys:
    """The keys of one file. Threads: any.

    token: the management token, which is always valid; empty for none. Raises ConfigError for a
    file that cannot be read, or has a line of another form.
    """

    def __init__(self, path: str, token: str = "", setting: str = "http.api_keys_file") -> None:
        self._token = token.encode()
        self._file = CredentialFile(path, setting)
        self._known = self._read()
        self._is_stale = False  # the file has changed, and not everybody has been told
        self._listeners: list[Callable[[], None]] = []

    def _read(self) -> _Known:
        credentials = self._file.credentials
        table = KeyTable([one.digest for one in credentials], self._token)
        return _Known(table, [*(one.name for one in credentials), ""])

    @property
    def table(self) -> KeyTable:
        """The keys that are valid now."""
        return self._known.table

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after every change of the keys, on the thread that reloads the file,
        before `refresh` returns; return what ends that."""
        self._listeners.append(listener)

        def end() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return end

    def refresh(self) -> bool:
        """Reload the file if it has changed; return whether new keys are in use.

        Raises what a listener raises; then the next call goes on.
        """
        self._is_stale = self._file.refresh() or self._is_stale
        if not self._is_stale:
            return False
        self._known = self._read()
        for listener in tuple(self._listeners):
            listener()
        self._is_stale = False
        return True

    def check(self, authorization: bytes) -> str:
        """Return the name of the key's owner; empty for the management token.

        authorization: the value of the header. Raises NotAllowed for an unknown or missing key.
        """
        known = self._known
        number = known.table.find(authorization)
        if number is not None:
            return known.names[number]
        wrong = "the key is not known here" if authorization else "this server requires a key"
        raise NotAllowed(
            f"{wrong}.", hint="Send Authorization: Bearer KEY; `clipper key NAME` makes one."
        )
