"""Builds the compiled core: one extension per module of src/clipper_core. CLIPPER_BUILD=release|debug|tsan|asan|coverage."""

import os
from glob import glob

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

BUILD = os.environ.get("CLIPPER_BUILD", "release")
QUIET = ("unused-parameter", "missing-field-initializers", "cast-function-type", "sign-compare")  # Cython's own code
WARNINGS = ["-Wall", "-Wextra", *(f"-Wno-{name}" for name in QUIET)]
FLAGS = {
    "release": ["-O2", "-mavx2", "-mbmi2"] if os.uname().machine == "x86_64" else ["-O2"],
    "debug": ["-O0", "-g", "-fno-omit-frame-pointer"],
    "tsan": ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=thread"],
    "asan": ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "coverage": ["-O0", "-g", "--coverage"],
}[BUILD]
CHECKED = BUILD in ("debug", "asan")

core = Extension(
    "clipper_core.*",
    ["src/clipper_core/*.pyx"],
    language="c++",
    depends=glob("src/clipper_core/*.hpp"),
    include_dirs=["src/clipper_core", numpy.get_include()],
    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")],
    extra_compile_args=["-std=c++17", "-fno-math-errno", *WARNINGS, *FLAGS],
    extra_link_args=[flag for flag in FLAGS if flag.startswith(("-fsanitize", "--coverage"))],
)

setup(
    ext_modules=cythonize(
        core,
        include_path=["src"],
        build_dir=None if BUILD == "release" else f"build/{BUILD}-cpp",  # what is generated differs: it must not be mistaken
        nthreads=os.cpu_count() or 1,
        compiler_directives={
            "language_level": "3",
            "freethreading_compatible": True,
            "auto_pickle": False,
            "embedsignature": True,
            "embedsignature.format": "python",
            "binding": True,
            "boundscheck": CHECKED,
            "wraparound": CHECKED,
            "cdivision": True,
            "initializedcheck": False,
        },
    )
)
