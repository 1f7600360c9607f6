"""Settings in parentheses, as policies, roles and classes of one's own are written:
`NAME(setting=value, ...)`."""

import ast
from typing import Any

from clipper.errors import InvalidInput


def parse_settings(rest: str, noun: str, text: str, example: str) -> dict[str, Any]:
    """Of `setting=value, ...)`, what follows the parenthesis: plain Python values by name.
    InvalidInput for anything else."""
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
