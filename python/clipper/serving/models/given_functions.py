"""Functions that a user gives at deployment and the server calls: their names in a record.

An importable function is kept as "module:function". One that is not, as a lambda, is known to this
process only: its name cannot be imported after a restart.
"""

import secrets
from collections.abc import Callable
from importlib import import_module

from clipper.errors import InvalidInput
from clipper.types import UserValue

Function = Callable[..., UserValue]
_given: dict[str, Function] = {}


def name_of(function: Function) -> str:
    """Return the name under which a record keeps the function."""
    text = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '<object>')}"
    if "<" in text:  # a lambda, or local: another may have its name, here or after a restart
        text += f"#{secrets.token_hex(8)}"
    _given[text] = function
    return text


def function_named(text: str, noun: str) -> Function:
    """Return the function of a name. noun: what it is, for messages. Raises InvalidInput."""
    if text in _given:
        return _given[text]
    module, _, name = text.partition(":")
    try:
        found: object = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(
            f"{noun} {text!r} cannot be imported: {error}.", hint="Put the function in a module."
        ) from None
    if not callable(found):
        raise InvalidInput(f"{noun} {text!r} is not a function.", hint="Write module:function.")
    return found
