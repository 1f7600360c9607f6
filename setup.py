"""Build the wheel. tools/build_core.py compiles the core.

The core is compiled for the processor of this machine. CLIPPER_CORE=any compiles one for all, as
`make wheels` does. CLIPPER_CORE=prebuilt takes the modules that are compiled in place and compiles
nothing.
CLIPPER_CORE=none leaves the compiled modules out: what the Makefile installs is editable, with the
core compiled in place.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

CORE = os.environ.get("CLIPPER_CORE", "compile")
if sys.platform != "linux" and CORE != "none":
    raise SystemExit(
        f"A clipper server runs on Linux, not on {sys.platform}. Run it in a container there"
        " (docs/images.md), and query it from here: pip install clipper-client"
    )
if CORE not in ("compile", "any", "prebuilt", "none"):
    raise SystemExit(
        f"CLIPPER_CORE={CORE} is not known. It is compile (the default), any, prebuilt or none."
    )

import build_core  # noqa: E402


def say(text: str) -> None:
    """Print a line about the build at once."""
    print(text, flush=True)


class BuildCore(build_ext):
    """Let tools/build_core.py compile the core, in place for editable installs and for `build_ext
    --inplace`."""

    def run(self) -> None:
        if CORE == "none":
            return
        in_place = self.inplace or self.editable_mode
        out = build_core.SOURCES if in_place else Path(self.build_lib) / build_core.PACKAGE
        if CORE == "prebuilt":
            for file in self._modules():
                path = build_core.SOURCES / file
                if not path.exists():
                    raise SystemExit(
                        f"{path} is not compiled. Run `make build`, or leave CLIPPER_CORE=prebuilt"
                        " out."
                    )
                if not in_place:
                    (out / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, out / file)
            return
        try:
            if CORE == "any":
                build_core.build_for_any(out, os.cpu_count() or 1, say)
            else:
                variant = os.environ.get("CLIPPER_BUILD", "release")
                build_core.build(variant, out, os.cpu_count() or 1, say)
        except build_core.BuildError as error:
            raise SystemExit(str(error)) from error

    def _modules(self) -> list[Path]:
        return [build_core.module_file(name) for name in build_core.module_names()]

    def get_outputs(self) -> list[str]:
        if CORE == "none" or self.inplace or self.editable_mode:
            return []
        built = Path(self.build_lib) / build_core.PACKAGE
        return [str(path) for path in built.rglob("*.so")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


# The names alone: what each module is made from, build_core knows.
extensions = [Extension(f"{build_core.PACKAGE}.{name}", []) for name in build_core.module_names()]
setup(ext_modules=[] if CORE == "none" else extensions, cmdclass={"build_ext": BuildCore})
