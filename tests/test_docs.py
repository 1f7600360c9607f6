"""The documentation is complete and its links resolve: every setting, error, command, frame,
status and public name has its place.

`python tests/test_docs.py` rewrites the generated tables: settings in docs/configuration.md, from
`clipper.config.describe()`; metrics in docs/monitoring.md, from `clipper.metrics.FAMILIES`; and the
generated parts of docs/architecture.md, from `tests.architecture`; the options of a model in
docs/managing.md, the keywords in `clipper.spec.keywords` and the client's methods in
`clipper/manage/verbs/calls.pyi`, from `tests.specifications`.
"""

import ast
import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md"]
)
OPERATING = DOCS / "operating.md"
CONFIGURATION = DOCS / "configuration.md"
MONITORING = DOCS / "monitoring.md"
BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"
METRICS_BEGIN, METRICS_END = "<!-- metrics: begin -->", "<!-- metrics: end -->"


def everything() -> str:
    return "\n".join(page.read_text() for page in PAGES)


def settings_table() -> str:
    config = importlib.import_module("clipper.config")
    lines = []
    section = ""
    for info in config.describe():
        head, _, key = info.key.rpartition(".")
        if head != section:
            section = head
            lines += [
                "",
                f"### [{section}]",
                "",
                "| key | default | unit | range | meaning |",
                "|---|---|---|---|---|",
            ]
        cells = (f"`{key}`", plain(info.default), info.unit, info.range, info.text)
        lines.append(" ".join(f"| {cell}" if cell else "|" for cell in cells) + " |")
    return "\n".join([BEGIN, *lines, "", END])


def metrics_table() -> str:
    families = importlib.import_module("clipper.metrics").FAMILIES.values()
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        meaning = family.help
        if family.renamed:
            meaning += f" Was `{family.renamed}`."
        if family.old:
            meaning += " Only with old names."
        lines.append(
            f"| `{family.name}` | {family.kind} |{f' {labels}' if labels else ''} | {meaning} |"
        )
    return "\n".join([METRICS_BEGIN, "", *lines, "", METRICS_END])


def test_the_generated_parts_of_the_architecture_are_true() -> None:
    architecture = importlib.import_module("tests.architecture")
    page = architecture.PAGE.read_text()
    assert page == architecture.replaced(page, architecture.blocks()), (
        "run: python tests/test_docs.py"
    )


THREAD = re.compile(r"`(clipper-[a-z-]+)`")


def test_a_query_passes_few_files() -> None:
    """The counts may only shrink; the goal is 15 on each side."""
    page = (DOCS / "architecture.md").read_text()
    python = page.partition("path: begin")[2].partition("path: end")[0]
    core = page.partition("What happens on a cache miss:")[2].partition("\n### ")[0]
    hit = page.partition("### One query\n")[2].partition("Other queries run")[0]
    assert len(set(re.findall(r"  (\S+\.py)\n", python))) == 15
    assert len(set(re.findall(r"`(\w+/\w+\.pyx)`", core))) == 16
    assert len(set(re.findall(r"`(\w+/\w+\.pyx)`", hit))) == 8


def test_every_thread_of_the_architecture_exists() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "python").rglob("*.py"))
    section = (
        (DOCS / "architecture.md").read_text().partition("## Threads")[2].partition("\n## ")[0]
    )
    missing = [name for name in THREAD.findall(section) if f'"{name}' not in code]
    assert not missing, f"docs/architecture.md names threads that do not exist: {missing}"


def plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:,}".replace(",", " ").removesuffix(".0")
    if isinstance(value, str):
        return value if " " in value else f'"{value}"'
    return "none" if value is None else "[]" if value == () else str(value)


def test_the_table_of_settings_is_true() -> None:
    page = CONFIGURATION.read_text()
    found = page[page.index(BEGIN) : page.index(END) + len(END)]
    assert found == settings_table(), "run: python tests/test_docs.py"


def test_the_table_of_metrics_is_true() -> None:
    page = MONITORING.read_text()
    found = page[page.index(METRICS_BEGIN) : page.index(METRICS_END) + len(METRICS_END)]
    assert found == metrics_table(), "run: python tests/test_docs.py"


def test_what_follows_from_the_specifications_is_true() -> None:
    """Covers the table of options in docs/managing.md, and the keywords of Python."""
    specifications = importlib.import_module("tests.specifications")
    for path, text in specifications.generated().items():
        assert path.read_text() == text, f"{path.name}: run: python tests/test_docs.py"


def test_every_error_has_its_row() -> None:
    errors = importlib.import_module("clipper.errors")
    page = OPERATING.read_text()
    missing = [
        name
        for name, thing in vars(errors).items()
        if isinstance(thing, type)
        and issubclass(thing, errors.ClipperError)
        and f"| `{name}` |" not in page
    ]
    assert not missing, f"errors without a row in docs/operating.md: {', '.join(missing)}"


def test_every_status_is_explained() -> None:
    status = importlib.import_module("clipper_core.runtime.status").Status
    missing = [member.name for member in status if f"`{member.name}`" not in everything()]
    assert not missing, f"statuses that docs/ does not name: {', '.join(missing)}"


def test_every_frame_kind_is_in_the_protocol() -> None:
    codec = importlib.import_module("clipper_core.wire.codec")
    page = (DOCS / "wire.md").read_text()
    named = [
        f"{member.value} {member.name}" for enum in (codec.Kind, codec.Flag) for member in enum
    ]
    missing = [name for name in named if name not in page]
    assert not missing, f"not in docs/wire.md: {', '.join(missing)}"


def test_every_verb_is_described() -> None:
    main = importlib.import_module("clipper.cli").main
    missing = [
        verb for verb in getattr(main, "commands", {}) if f"clipper {verb}" not in everything()
    ]
    assert not missing, (
        f"verbs that docs/ does not name: {', '.join(f'clipper {verb}' for verb in missing)}"
    )


def test_every_public_name_is_documented() -> None:
    clipper = importlib.import_module("clipper")
    public = [name for name in clipper.__all__ if not name.startswith("_")]
    missing = [name for name in public if not re.search(rf"\b{name}\b", everything())]
    assert not missing, f"public names that docs/ does not name: {', '.join(missing)}"


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    wrong = []
    for link in LINK.findall(page.read_text()):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            wrong.append(link)
    assert not wrong, f"{page.name}: {', '.join(wrong)}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the usual renderers form them."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


REFERENCE = re.compile(r"""docs/([\w-]+\.md)(?:,\W+"([^"]+)")?""")
SOURCES = ["src", "python", "container_sdk", "dashboard", "tests", "bench", "tools", "examples"]


def test_every_reference_from_code_leads_somewhere() -> None:
    """A comment or docstring that names a page, or a heading of a page, names one that exists."""
    wrong = []
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix not in {".py", ".pxd", ".pyx", ".hpp", ".proto", ".jsx"}:
                continue
            for page, heading in REFERENCE.findall(path.read_text()):
                words = re.sub(r"\W+", " ", heading).strip()
                headings = re.findall(r"^#+ +(.*)$", text_of(DOCS / page), re.M)
                if not (DOCS / page).exists() or (
                    words and words not in [re.sub(r"\W+", " ", one).strip() for one in headings]
                ):
                    wrong.append(f"{path.relative_to(ROOT)}: {page} {words}".strip())
    assert not wrong, "\n".join(wrong)


def text_of(page: Path) -> str:
    return page.read_text() if page.exists() else ""


FILE = re.compile(
    r"`((?:src|python|container_sdk|tests|bench|docs|tools|dashboard|examples|deploy)/[\w./*-]+)"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = {path for path in FILE.findall(page.read_text()) if not re.search(r"[A-Z]{4}", path)}
    wrong = [path for path in sorted(named) if not list(ROOT.glob(path.rstrip("/.")))]
    assert not wrong, f"{page.name}: {', '.join(wrong)}"


MODULE = re.compile(r"`([a-z_]+/[\w/]+\.(?:pyx|pxd|hpp|py))`")


def test_every_module_that_the_architecture_names_exists() -> None:
    roots = (ROOT, ROOT / "src" / "clipper_core", ROOT / "python" / "clipper")
    named = set(MODULE.findall((DOCS / "architecture.md").read_text()))
    wrong = [name for name in sorted(named) if not any((root / name).exists() for root in roots)]
    assert not wrong, f"docs/architecture.md: {', '.join(wrong)}"


FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_example_is_well_formed(page: Path) -> None:
    for language, text in FENCE.findall(page.read_text()):
        if language == "python":
            ast.parse(text, page.name)
        elif language == "toml":
            tomllib.loads(text)


def test_every_example_of_settings_is_accepted(tmp_path: Path) -> None:
    load = importlib.import_module("clipper.config").load
    for page in PAGES:
        for language, text in FENCE.findall(page.read_text()):
            if language == "toml":
                (tmp_path / "clipper.toml").write_text(text)
                load(tmp_path / "clipper.toml", env={})


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for path, begin, end, table in (
        (CONFIGURATION, BEGIN, END, settings_table()),
        (MONITORING, METRICS_BEGIN, METRICS_END, metrics_table()),
    ):
        text = path.read_text()
        path.write_text(text[: text.index(begin)] + table + text[text.index(end) + len(end) :])
    for place, text in importlib.import_module("tests.specifications").generated().items():
        place.write_text(text)
    parts = importlib.import_module("tests.architecture")
    generated = parts.blocks() | {"path": parts.query_path()}
    parts.PAGE.write_text(parts.replaced(parts.PAGE.read_text(), generated))
