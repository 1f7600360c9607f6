"""Models that a program serves: any command line whose process connects to the server by itself
(docs/sdk-cpp-java.md)."""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from clipper.deploy.deployer import ContainerSpec
from clipper.errors import InvalidInput, PackagingError
from clipper_container import parent_death
from clipper_container.wire.frames import Kind, encode_header, encode_rows
from clipper_container.worker.outputs import to_rows
from clipper_container.worker.warmup import OFF, given_rows

WORDS_MAX = 256
COMMAND_BYTES_MAX = 16 << 10
THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_HINT = 'Give the words of the command line, as ["java", "-jar", "svm.jar"].'


@dataclass(frozen=True, slots=True)
class Command:
    """A command line to run as a container. words: program and arguments. folder: where it runs."""

    words: tuple[str, ...]
    folder: str

    @property
    def text(self) -> str:
        """The command line as a shell shows it."""
        return shlex.join(self.words)


def command_of(name: str, command: str | Sequence[str], folder: str = "") -> Command:
    """Check a command line. A text is split as a shell does; no shell runs it.

    folder: where the program runs, and what relative paths refer to; empty: the current one.

    Raises: InvalidInput.
    """
    try:
        words = tuple(shlex.split(command) if isinstance(command, str) else command)
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"command of model {name!r}: {error}.", hint=_HINT) from None
    wrong = not words or not all(isinstance(word, str) and "\0" not in word for word in words)
    if wrong or not words[0]:
        raise InvalidInput(f"command of model {name!r} is {command!r:.200}.", hint=_HINT)
    if len(words) > WORDS_MAX or sum(map(len, words)) > COMMAND_BYTES_MAX:
        raise InvalidInput(
            f"command of model {name!r}: at most {WORDS_MAX} words and {COMMAND_BYTES_MAX}"
            " characters.",
            hint="Let the program read a file.",
        )
    try:
        place = os.path.abspath(folder or os.getcwd())
    except OSError as error:
        raise InvalidInput(
            f"command of model {name!r}: the folder of the server is gone ({error.strerror}).",
            hint="Give folder=, or start the server in one that exists.",
        ) from None
    if not os.path.isdir(place):
        raise InvalidInput(f"command of model {name!r}: there is no folder {place}.", hint=_HINT)
    if program(words[0], place) is None:
        raise InvalidInput(
            f"command of model {name!r}: there is no program {words[0]!r} on the server's host.",
            hint=f"Give its path; relative ones start from {place}.",
        )
    return Command(words, place)


def chosen(
    name: str, model: object, command: str | Sequence[str] | None, folder: str = ""
) -> object:
    """Return what `deploy` runs: a model, or a Command in `folder`. Raises: InvalidInput unless it
    is one."""
    if (model is None) == (command is None):
        hint = 'Deploy a model, or a program by command=["./svm"].'
        raise InvalidInput(f"deploy of {name!r} needs a model or a command.", hint=hint)
    return model if command is None else command_of(name, command, folder)


def program(word: str, folder: str) -> str | None:
    """Return the path of a program: found on PATH, or relative to `folder`; None if missing."""
    return shutil.which(os.path.join(folder, word) if os.sep in word else word)


def check_permitted(words: Sequence[str], permitted: Iterable[str]) -> None:
    """Refuse a command of a management client whose program is not in `server.commands`.

    Raises: PackagingError.
    """
    if words and words[0] not in permitted:
        raise PackagingError(
            f"the program {words[0]!r} is not one that clients may have started here.",
            hint=f"Set server.commands = [{json.dumps(words[0])}], or deploy in the server's"
            " process.",
        )


def check_combination(name: str, options: Mapping[str, object]) -> None:
    """Refuse options of `deploy` that only Python containers have. Raises: InvalidInput."""
    for option, value in options.items():
        if value:
            raise InvalidInput(
                f"model {name!r} is a command, and {option} is for models in Python.",
                hint=f"Remove {option}: the program does this itself.",
            )


def command_line(words: Sequence[str], folder: str) -> list[str]:
    """Return the command line of a process that ends with its parent thread and becomes the
    program.
    """
    path = program(words[0], folder) or words[0]
    return parent_death.command([path, *words[1:]], folder)


def variables(spec: ContainerSpec, replica: int) -> dict[str, str]:
    """Return the environment variables that tell a program what it is; empty ones do not hold."""
    texts = {
        "INPUT": "" if spec.input == "any" else spec.input or "",
        "OUTPUT": "" if spec.output == "any" else spec.output or "",
        "BATCH_MAX": str(spec.batch_max) if spec.batch_max else "",
        "WARMUP": warmup_variable(spec.warmup, spec.input or "any", spec.name),
    }
    return {
        "CLIPPER_ADDRESS": spec.connect,
        "CLIPPER_MODEL": spec.name,
        "CLIPPER_VERSION": str(spec.version),
        "CLIPPER_REPLICA": str(replica),
        "CLIPPER_PROTOCOL": str(spec.protocol),
        "CLIPPER_RETRY_SINGLY": str(int(spec.retry_singly)),
        **{f"CLIPPER_{key}": text for key, text in texts.items()},
        **dict.fromkeys(THREAD_LIMITS, str(spec.threads)),
    }


def warmup_variable(warmup: str, input: str, name: str) -> str:
    """Return CLIPPER_WARMUP: `off`, a PREDICT frame in base64, or nothing for generated rows.

    Raises: InvalidInput if the rows are not of the input type.
    """
    if not warmup or warmup == OFF:
        return warmup
    try:
        rows = given_rows(json.loads(warmup), input)
    except (ValueError, TypeError) as error:
        raise InvalidInput(
            f"the warm-up rows of model {name!r} cannot be read as {input}: {error}.",
            hint="Give rows of that type, or warmup=False.",
        ) from None
    header, pieces = encode_rows(Kind.PREDICT, to_rows(rows, len(rows), name))
    return base64.b64encode(b"".join([encode_header(header), *pieces])).decode()
