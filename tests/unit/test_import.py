"""`import clipper` loads little, and every public name can still be imported."""

import json
import subprocess
import sys

import clipper

MODULES_MAX = 60  # of ours
LOADED = (
    "import json, sys, clipper;"
    "print(json.dumps([m for m in sys.modules if m.startswith('clipper') or m == 'numpy']))"
)


def test_import_loads_few_modules_and_not_the_core() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True
    )
    loaded = json.loads(done.stdout)
    assert len(loaded) <= MODULES_MAX, loaded
    assert "numpy" not in loaded
    assert not [module for module in loaded if module.startswith("clipper_core")]


def test_every_public_name_can_be_imported() -> None:
    for name in clipper.__all__:
        assert getattr(clipper, name) is not None
    assert set(clipper.__all__) <= set(dir(clipper))
