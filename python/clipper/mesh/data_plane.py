"""The table of unary gRPC methods that are forwarded, and where their payloads hold the model id.

A JSON file:

    {"rpcConfigs": {"tensorflow.serving.PredictionService/Predict": {"idExtractionPath": [1, 1]},
                    "my.Service/Ask": {"idInjectionPath": [2], "vModelId": false}},
     "allowOtherRpcs": false}

idExtractionPath: the field with the id, if no header names it; without one, calls need the header
`mm-model-id`. idInjectionPath: the field that gets the id before the model sees the payload.
allowOtherRpcs: methods that are not listed are forwarded too, by the header. vModelId is ignored:
models and v-models share their names. Source: model-mesh's data-plane configuration; its files work
unchanged.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from clipper.credentials.credential_file import stamp_of
from clipper.errors import ConfigError, InvalidInput
from clipper.mesh.splice import extract, field_path, inject

_log = logging.getLogger(__name__)
_CHECK_S: Final = 1.0
_METHODS_MAX: Final = 1000


class Method(msgspec.Struct, frozen=True, rename="camel"):
    """The configuration of one method; see the module."""

    id_extraction_path: tuple[int, ...] = ()
    id_injection_path: tuple[int, ...] = ()
    v_model_id: bool = False

    def id_of(self, payload: bytes) -> str:
        """Return the id in a payload; empty if there is none. InvalidInput for invalid bytes."""
        return (extract(payload, self.id_extraction_path) or "") if self.id_extraction_path else ""

    def with_id(self, payload: bytes, id: str) -> bytes:
        """Return the payload as the model gets it."""
        return inject(payload, self.id_injection_path, id) if self.id_injection_path else payload


class _File(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    rpc_configs: dict[str, Method] = {}
    allow_other_rpcs: bool = False


OTHER: Final = Method()


def parse(text: bytes) -> _File:
    """Return the table in a file's content. InvalidInput."""
    try:
        found = msgspec.json.decode(text, type=_File)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"{error}.") from None
    if len(found.rpc_configs) > _METHODS_MAX:
        raise InvalidInput(
            f"{len(found.rpc_configs)} methods are listed: up to {_METHODS_MAX} can be."
        )
    for name, method in found.rpc_configs.items():
        service, slash, last = name.partition("/")
        if not service or not slash or not last or "/" in last:
            raise InvalidInput(
                f"{name[:100]!r} is not a method.", hint="It is package.Service/Method."
            )
        for path in (method.id_extraction_path, method.id_injection_path):
            if path:
                field_path(path)
    return found


class DataPlane:
    """The table, read again when its file changes. Threads: one."""

    def __init__(self, path: str, now_s: Callable[[], float]) -> None:
        """Read the table. ConfigError when the file is missing or invalid."""
        self._path, self._now_s, self._checked_s = Path(path), now_s, now_s()
        self._stamp = stamp_of(path)
        try:
            self._table = parse(self._path.read_bytes())
        except (OSError, InvalidInput) as error:
            raise ConfigError(
                f"mesh.data_plane = {path!r}: {_why(error)}", hint=getattr(error, "hint", "")
            ) from None

    def of(self, method: str) -> Method | None:
        """Return the configuration of `package.Service/Name`; None: it is not forwarded."""
        now_s = self._now_s()
        if now_s - self._checked_s >= _CHECK_S:
            self._checked_s = now_s
            self._check()
        found = self._table.rpc_configs.get(method)
        return found if found is not None else OTHER if self._table.allow_other_rpcs else None

    def _check(self) -> None:
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._table = parse(self._path.read_bytes())
            _log.info("%s: the table of methods was read again", self._path)
        except FileNotFoundError:
            # An editor is replacing it.
            pass
        except (OSError, InvalidInput) as error:
            _log.error("%s has changed, and is not used: %s", self._path, _why(error))


def _why(error: Exception) -> str:
    if isinstance(error, InvalidInput):
        return error.message
    return str(getattr(error, "strerror", "") or error) + "."
