"""Commands, options, keywords and settings that errors, help, the dashboard and the documentation
propose exist."""

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import click
import pytest

from clipper.cli.command_group import CommandGroup
from tests.style import parsed

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [
    *sorted((ROOT / "python").rglob("*.py")),
    *sorted((ROOT / "container_sdk" / "src").rglob("*.py")),
]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
DASHBOARD = sorted((ROOT / "dashboard" / "src").glob("*.jsx"))

# -- commands


@cache
def shell() -> click.Group:
    return importlib.import_module("clipper.cli").main  # type: ignore[no-any-return]


def trouble_of(words: list[str], positionals: bool) -> str:
    """Say what is wrong with the words after `clipper`; "" if they can be run. positionals: whether
    to count those too."""
    command: click.Command = shell()
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    if isinstance(command, CommandGroup) and command.default and words:
        command = command.commands[command.default]  # the word may be left out
    if isinstance(command, click.Group) and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
        return (
            f"{command.name!r} has no command {words[0]!r}"
            if command is not shell() or positionals
            else ""
        )
    options = {
        name: option for option in command.params for name in (*option.opts, *option.secondary_opts)
    }
    given = 0
    while words:
        word, *words = words
        name = word.partition("=")[0]
        if not re.match(r"--?[a-z]", word):
            given += 1
        elif name in ("-h", "--help"):
            continue
        elif name not in options:
            return f"{command.name!r} has no option {name}"
        elif not getattr(options[name], "is_flag", False) and "=" not in word:
            words = words[1:]
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    most = (
        sum(argument.nargs for argument in arguments)
        if all(one.nargs > 0 for one in arguments)
        else given
    )
    return (
        f"{command.name!r} takes at most {most} arguments, not {given}"
        if positionals and given > most
        else ""
    )


def words_of(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that another line closes
        return text.split()


def commands_in(text: str) -> Iterator[str]:
    """Yield the commands in a line of a shell: what follows `clipper`, up to the end of that
    command."""
    for found in re.finditer(
        r"(?:^|[\s;&|(=])clipper +((?:[^;&|>#<\n\"']|\"[^\"]*\"|'[^']*')+)", text
    ):
        yield found[1].strip()


def wrong_lines(lines: list[str]) -> list[str]:
    return [
        f"clipper {command}: {why}"
        for line in lines
        for command in commands_in(line)
        if (why := trouble_of(words_of(command), positionals=True))
    ]


SPAN = re.compile(r"`(clipper [^`\n]+)`")
FENCE = re.compile(r"^```(?:bash|sh|console|shell)?\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_documentation_exist(page: Path) -> None:
    text = page.read_text()
    lines = [
        line.removeprefix("$ ")
        for block in FENCE.findall(text)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    lines = [line for line in lines if line.startswith("clipper ")]
    lines += [
        span.split(": ")[0]
        for span in SPAN.findall(text)
        if "VERB" not in span and "…" not in span and "..." not in span
    ]
    wrong = wrong_lines(lines)
    assert not wrong, "\n".join(wrong)


def test_commands_of_the_dashboard_exist() -> None:
    wrong = []
    for path in DASHBOARD:
        text = re.sub(r"\$?\{[^{}]*\}", "X", path.read_text())
        shown = re.findall(r"<code>(clipper [^<]*)</code>", text) + re.findall(
            r"[`\"'](clipper [^`\"'<]*)[`\"']", text
        )
        wrong += [f"{path.name}: {line}" for line in wrong_lines(shown)]
    assert not wrong, "\n".join(wrong)


def test_examples_of_the_help_exist() -> None:
    wrong = []
    todo: list[tuple[str, click.Command]] = [("clipper", shell())]
    while todo:
        name, command = todo.pop()
        if isinstance(command, click.Group):
            todo += [(f"{name} {below}", one) for below, one in command.commands.items()]
        lines = [line.strip() for line in (command.help or "").splitlines()]
        examples = [
            re.split(r" {3,}", line)[0]
            for line in lines
            if line.startswith("clipper ") and "VERB" not in line
        ]
        wrong += [
            f"{name}: {line}"
            for line in wrong_lines([part for line in examples for part in line.split(", ")])
        ]
    assert not wrong, "\n".join(wrong)


# -- texts of the code


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield every string of a file; a value that is formatted into it is an X."""
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside.update(ast.walk(node))
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            yield node.value


def errors_of(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of errors that are raised, and of hints."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from texts_of(node.exc)
        elif isinstance(node, ast.keyword) and node.arg == "hint":
            yield from texts_of(node.value)
        if isinstance(node, ast.Assign) and any(
            isinstance(one, ast.Name) and one.id == "hint" for one in node.targets
        ):
            yield from texts_of(node.value)


def test_commands_in_messages_exist() -> None:
    """A message is prose: a command ends with its sentence, and only its subcommands and options
    are looked at."""
    wrong = []
    for path in SOURCES:
        for text in texts_of(parsed(path)):
            for command in commands_in(text):
                words = words_of(re.split(r" {2,}|[.:,] |[.:,]$|\)", command)[0])
                if (
                    words
                    and words[0] in shell().commands
                    and (why := trouble_of(words, positionals=False))
                ):
                    wrong.append(f"{path.relative_to(ROOT)}: clipper {command}: {why}")
    assert not wrong, "\n".join(wrong)


@cache
def keywords() -> frozenset[str]:
    """Return the names of settings, and of the parameters of what a user can call."""
    clipper, container = (
        importlib.import_module("clipper"),
        importlib.import_module("clipper_container"),
    )
    names: set[str] = set()
    modules = [
        clipper,
        container,
        importlib.import_module("clipper.params"),
        importlib.import_module("clipper_container.tables"),
    ]
    named = {(module, name) for module in modules for name in dir(module) if name[0] != "_"}
    for thing in (getattr(module, name) for module, name in named):
        methods = (
            [method for name, method in vars(thing).items() if name[0] != "_"]
            if inspect.isclass(thing)
            else []
        )
        for call in (
            [thing, *methods] if inspect.isclass(thing) or inspect.isfunction(thing) else ()
        ):
            names.update(parameters_of(call))
    return frozenset(names | {info.key.rpartition(".")[2] for info in settings()})


def parameters_of(call: Any) -> Iterator[str]:
    try:
        for parameter in inspect.signature(call).parameters.values():
            options = get_args(parameter.annotation)  # of **options: Unpack[TypedDict]
            yield from getattr(options[0], "__annotations__", ()) if options else ()
            yield parameter.name
    except (TypeError, ValueError):
        return


def settings() -> Any:
    return importlib.import_module("clipper.config").describe()


# a table of parameters, a setting of an optimizer, a field of a registered model
EXAMPLES = {"taste", "rate", "key"}
PROPOSED = re.compile(r"(?<![\w.\-/{?&(`])([a-z_]{3,})=(?:True|False|None|\[|\"|'|\.\.\.|[0-9])")


def test_keywords_in_errors_exist() -> None:
    """`row_by_row=True` in a message is a keyword that some call takes."""
    wrong = [
        f"{path.relative_to(ROOT)}: {name}=: {text}"
        for path in SOURCES
        for text in errors_of(parsed(path))
        for name in PROPOSED.findall(text)
        if name not in keywords() | EXAMPLES
    ]
    assert not wrong, "\n".join(wrong)


def test_settings_in_errors_exist() -> None:
    """`limits.queue_rows_max` in a message is a setting."""
    known = {info.key for info in settings()}
    sections = "|".join(
        sorted(
            {key.split(".")[0] for key in known} - {"models", "apps", "streams", "model_streams"}
        )
    )
    named = re.compile(rf"(?<![\w./{{])({sections})\.([a-z_]+)\b(?!\()")
    wrong = [
        f"{path.relative_to(ROOT)}: {section}.{key}: {text}"
        for path in SOURCES
        for text in errors_of(parsed(path))
        for section, key in named.findall(text)
        if f"{section}.{key}" not in known
        and not hasattr(importlib.import_module("clipper").ClipperServer, key)
    ]
    assert not wrong, "\n".join(wrong)


# -- the checks notice what they are for


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("feedback APP ID VALUE", "at most 2 arguments"),
        ("feedback APP ID --label 7", ""),
        ("mesh explode X", "no command 'explode'"),
        ("deploy svm svm.onnx --replica 3", "no option --replica"),
        ("deploy doubler doubler:double --input 'f64[3]' -o json", ""),
        ("nothing", "no command 'nothing'"),
    ],
)
def test_a_wrong_command_is_noticed(command: str, reason: str) -> None:
    found = trouble_of(words_of(command), positionals=True)
    assert (reason in found) if reason else not found


def test_texts_and_keywords_are_found() -> None:
    source = "raise E(f\"no {x}; use batch=False.\", hint='Give code=[...]: see limits.tasks_max')"
    hint = "Give code=[...]: see limits.tasks_max"
    assert list(dict.fromkeys(errors_of(ast.parse(source)))) == ["no X; use batch=False.", hint]
    assert PROPOSED.findall("use batch=False, or code=[...]") == ["batch", "code"]
    assert "batch" not in keywords()
    assert {"code", "row_by_row", "queue_rows_max", "wait"} <= keywords()
