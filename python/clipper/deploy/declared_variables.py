"""The environment variables that a model declares for its containers (`env`)."""

import re
from collections.abc import Mapping
from typing import Final

from clipper.errors import InvalidInput

DECLARED_MAX: Final = 64  # variables of a model
DECLARED_BYTES_MAX: Final = 16 << 10  # of their names and values
_OWN: Final = "CLIPPER_"
_SHOWN: Final = 64  # characters of a name in an error
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def declared_variables(model: str, given: Mapping[str, str]) -> dict[str, str]:
    """Check the environment variables that a model declares (`env`), and return them. Raises:
    InvalidInput."""
    for name, value in given.items():
        if not _NAME.fullmatch(name) or not isinstance(value, str) or "\0" in value:
            raise InvalidInput(
                f"env of model {model!r}: {name[:_SHOWN]!r} is no variable with a text.",
                hint='Names have letters, digits and _: env = { MODE = "fast" }.',
            )
        if name.startswith(_OWN):
            raise InvalidInput(
                f"env of model {model!r}: {name} is Clipper's own.",
                hint=f"Give it a name that does not begin with {_OWN}.",
            )
    size = sum(len(name.encode()) + len(value.encode()) for name, value in given.items())
    if len(given) > DECLARED_MAX or size > DECLARED_BYTES_MAX:
        raise InvalidInput(
            f"env of model {model!r}: at most {DECLARED_MAX} variables and {DECLARED_BYTES_MAX}"
            " bytes.",
            hint="Let the model read a file.",
        )
    return dict(given)
