"""The syntax of settings in parentheses: `NAME(setting=value, ...)`.

Policies, roles and user-defined classes are written like this.
"""

import ast

from clipper.errors import InvalidInput
from clipper.types import UserValue


def parse_settings(rest: str, noun: str, text: str, example: str) -> dict[str, UserValue]:
    """Parse `setting=value, ...)`, the part after the opening parenthesis, into Python literals.

    noun, text, example: what is parsed, for messages.  Raises InvalidInput for anything else.
    """
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if (
            not isinstance(call, ast.Call)
            or call.args
            or any(word.arg is None for word in call.keywords)
        ):
            raise ValueError
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError):
        raise InvalidInput(
            f"cannot read the {noun} {text[:100]!r}.", hint=f"Write {example}."
        ) from None
