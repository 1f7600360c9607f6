"""`python -m clipper` is `clipper`."""

import gc
from functools import partial
from typing import NoReturn

from clipper_container.process_end import run_and_end


def run() -> NoReturn:
    """Run the command line, and end its process.

    A command lives for a fifth of a second: a quarter of that would be spent on the search for
    garbage, of which imports make none, and on the teardown of the interpreter.
    """
    gc.disable()
    from clipper.cli import main

    gc.enable()
    run_and_end(partial(main, prog_name="clipper"))


if __name__ == "__main__":
    run()
