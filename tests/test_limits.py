"""Each limit of docs/limits.md exists in the code, with the default that the page gives."""

import importlib
import re
from pathlib import Path

import msgspec

from clipper.config import Config, describe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "limits.md"
ROW = re.compile(r"^\| `([\w.]+)`(?: of `([\w.]+)`)? \| ([\d.]+) \| (.+) \|$")
SECTIONS = ("http", "grpc", "limits", "params", "mesh", "feedback")
PEERS_WAIT = (
    "http.header_s",
    "http.body_bytes_s_min",
    "http.idle_s",
    "grpc.idle_s",
    "http.backlog",
    "mesh.load_s",
)
NO_PEERS = {  # what no peer can make grow: it bounds what the server's own configuration asks for
    "http.metrics_names_max",
    "http.described_max",
    "limits.cache_bytes_max",
    "limits.state_bytes_max",
    "limits.followed_max",
    "params.snapshots_max",
    "params.deltas_max",
}


def rows() -> list[tuple[str, str, float, str]]:
    """Return (name, module or "", default, what happens) of each row of the page."""
    found = [match for line in PAGE.read_text().splitlines() if (match := ROW.match(line))]
    return [
        (name, module or "", float(default), text)
        for name, module, default, text in (match.groups() for match in found)
    ]


def constant(module: str, name: str) -> float:
    """Return a constant of a Python module, or one that a page or a module of the core declares."""
    if not module.startswith("clipper_core."):
        return float(getattr(importlib.import_module(module), name))
    base = ROOT / "src" / "clipper_core" / module.partition(".")[2].replace(".", "/")
    files = [base.with_suffix(suffix) for suffix in (".pxd", ".pyx")]
    text = "".join(file.read_text() for file in files if file.exists())
    (found,) = re.findall(rf"^    {name} = (\d+)\b", text, re.MULTILINE)
    return float(found)


def test_each_limit_has_the_default_that_the_page_states() -> None:
    config = msgspec.to_builtins(Config())
    wrong = []
    for name, module, default, _ in rows():
        if module:
            value = constant(module, name)
        else:
            section, _, key = name.partition(".")
            value = float(config[section][key])
        if value != default:
            wrong.append(f"{name}: {value:g}, the page says {default:g}")
    assert not wrong, "\n".join(wrong)


def test_each_limit_of_the_settings_is_on_the_page() -> None:
    named = {name for name, module, _, _ in rows() if not module}
    limits = {
        info.key
        for info in describe()
        if info.key.partition(".")[0] in SECTIONS and info.key.endswith("_max")
    }
    missing = (limits | set(PEERS_WAIT)) - NO_PEERS - named
    assert not missing, f"limits without a row in {PAGE.name}: {', '.join(sorted(missing))}"
    assert len(named) == sum(1 for _, module, _, _ in rows() if not module), (
        "a setting has two rows"
    )


def test_each_row_of_the_page_is_read() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(lines) == len(rows())
