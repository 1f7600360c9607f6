"""The sources of a `module:attribute`: which files it needs, and the copy that a version keeps."""

import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipper.deploy.packages.folders import names_under
from clipper.deploy.packages.package import pack
from clipper.deploy.packages.sources import imports_in, own_folders, reached, shipped
from clipper_container.loading.targets import load_target


def folder_of(place: Path, **files: str) -> Path:
    """Write files; `__` in a name is a slash. Returns the folder."""
    for name, text in files.items():
        path = place / name.replace("__", "/").replace("-init-", "__init__")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return place


@pytest.fixture(autouse=True)
def fresh_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what tests import and add to sys.path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("feat", "near", "pkg", "lib", "late"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def forget(*names: str) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] in names]:
        del sys.modules[name]
    importlib.invalidate_caches()


def test_only_what_is_imported_or_named_is_reached(tmp_path: Path) -> None:
    home = folder_of(
        tmp_path,
        **{
            "feat.py": (
                "import json, near\nfrom pkg.deep import f\nimport os, pathlib\n"
                "HERE = pathlib.Path(__file__).parent\n"
                "A = HERE / 'data' / 'a.csv'\nB = os.path.join(HERE, 'more', 'b.csv')\n"
                "C = open('weights.bin') if 0 else 'up.out'\nD = HERE / 'tree'\n"
            ),
            "near.py": "def g():\n    import late\n",
            "late.py": "",
            "other.py": "",
            "pkg__-init-.py": "from . import side\n",
            "pkg__deep.py": "f = 1",
            "pkg__side.py": "from ..up import x\n",
            "pkg__k.txt": "7",
            "pkg__sub__v.txt": "8",
            "data__a.csv": "",
            "data__unnamed.csv": "",
            "more__b.csv": "",
            "tree__leaf.txt": "",
            "weights.bin": "w",
            "up.out": "log",
            "clipper.toml": "password",
        },
    )
    found = reached(["feat"], [home])
    assert found.files == {
        home: sorted(
            [
                "data/a.csv",
                "feat.py",
                "late.py",
                "more/b.csv",
                "near.py",
                "pkg/__init__.py",
                "pkg/deep.py",
                "pkg/k.txt",
                "pkg/side.py",
                "pkg/sub/v.txt",
                "tree/leaf.txt",
                "weights.bin",
            ]
        )
    }
    assert {"json", "near", "late", "pkg", "os"} <= {*imports_in(found)}


def test_modules_of_a_folder_without_init_are_reached_one_by_one(tmp_path: Path) -> None:
    home = folder_of(
        tmp_path, **{"src__feat.py": "from . import near\n", "src__near.py": "", "src__x.py": ""}
    )
    assert reached(["src.feat"], [home]).files == {home: ["src/feat.py", "src/near.py"]}
    assert reached(["src.nothing", "absent"], [home]).files == {}


def test_folders_beside_the_one_of_the_module_go_whole(tmp_path: Path) -> None:
    home = folder_of(tmp_path / "home", **{"feat.py": "import lib\n", "other.py": ""})
    more = folder_of(tmp_path / "more", **{"lib.py": "", "plugin.py": "", "k.txt": ""})
    found = shipped("feat:f", [str(more), str(home)])
    assert [*found.files.items()] == [(more, ["k.txt", "lib.py", "plugin.py"]), (home, ["feat.py"])]
    assert shipped("", [str(home)]).files == {home: ["feat.py", "other.py"]}


def test_a_version_keeps_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = folder_of(
        tmp_path / "home",
        **{
            "feat.py": (
                "import importlib, pathlib, near, pkg.core\n"
                "def f():\n"
                "    k = pathlib.Path(__file__).with_name('weights.txt').read_text()\n"
                "    late = importlib.import_module('la' + 'te')\n"
                "    return near.K, k, pkg.core.data(), late.L\n"
            ),
            "near.py": "K = 1\n",
            "late.py": "L = 'late'\n",
            "weights.txt": "w",
            "pkg__-init-.py": "",
            "pkg__core.py": (
                "import os\ndef data():\n"
                "    with open(os.path.join(os.path.dirname(__file__), 'in', 'k')) as file:\n"
                "        return file.read()\n"
            ),
            "pkg__in__k": "7",
        },
    )
    monkeypatch.syspath_prepend(str(home))
    first = pack("feat:f", "m", 1, tmp_path / "models")
    again = pack("feat:f", "m", 1, tmp_path / "models")
    assert first == again
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".code"]
    (home / "near.py").write_text("K = 2\n")
    second = pack("feat:f", "m", 2, tmp_path / "models")
    (home / "near.py").write_text("K = (\n")
    (home / "feat.py").write_text("def (\n")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(home)])
    for package, k in ((first, 1), (second, 2), (first, 1)):
        forget("feat", "near", "pkg", "late")
        monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.startswith(str(tmp_path))])
        assert load_target(package.target, code=package.code)() == (k, "w", "7", "late")
    assert own_folders(first.code) == first.code[:1]
    shutil.rmtree(tmp_path / "models")
    assert own_folders(first.code) == first.code  # on a host that lacks the copy


def test_the_copy_follows_no_links_and_holds_no_hidden_files(tmp_path: Path) -> None:
    home = folder_of(tmp_path / "home", **{"feat.py": "", ".secret": "", "other.py": ""})
    (home / "loop").symlink_to(home)
    (home / "gone").symlink_to(home / "not-there")
    package = pack("feat:f", "m", 1, tmp_path / "models", code=[str(home)])
    assert sorted(os.listdir(package.code[0])) == ["feat.py", "gone", "loop"]
    assert not (Path(package.code[0]) / "feat.py").is_symlink()


def test_ignore_files_are_those_of_git(tmp_path: Path) -> None:
    home = folder_of(
        tmp_path,
        **{
            ".gitignore": "*.csv\n!keep.csv\n/top.txt\nbuild/\nlogs/**/x.txt\n# c\n\nd?.bin\n",
            "a.csv": "",
            "keep.csv": "",
            "top.txt": "",
            "sub__top.txt": "",
            "sub__a.csv": "",
            "build__x.py": "",
            "logs__1__2__x.txt": "",
            "logs__y.txt": "",
            "d1.bin": "",
            "d10.bin": "",
            "up.log": "",
            "up.pid": "",
            "out__kustomization.yaml": "",
            "out__m.py": "",
        },
    )
    assert [*names_under(home)] == ["d10.bin", "keep.csv", "logs/y.txt", "sub/top.txt"]
    (home / ".dockerignore").write_text("keep.csv\n")
    assert "keep.csv" not in [*names_under(home)]
    assert "a.csv" in [*names_under(home)]


def test_a_package_is_listed_once_however_many_of_its_names_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text("")
    for number in range(20):
        lines = [f"from shop.m{other} import f{other}" for other in range(20)]
        (tmp_path / "shop" / f"m{number}.py").write_text("\n".join(lines))
    listed = list[Path]()

    def counted(place: Path) -> Iterator[str]:
        listed.append(place)
        return names_under(place)

    monkeypatch.setattr("clipper.deploy.packages.sources.names_under", counted)
    found = reached(["shop.m0"], [tmp_path])
    assert len(found.files[tmp_path]) == 21
    assert listed == [tmp_path / "shop"]
