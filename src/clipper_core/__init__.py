"""The compiled core.

A wheel for x86-64 has it twice: compiled for x86-64-v2, which nearly all processors since 2009
are, and in the folder `avx2` for those with AVX2 and BMI2. All modules of a process come from one
of them. CLIPPER_CPU=baseline takes the first on any processor. A checkout has one core, compiled
for the processor of its machine.
"""

import os
from importlib import import_module

_AVX2 = os.path.join(__path__[0], "avx2")
if (
    os.path.isdir(_AVX2)
    and os.environ.get("CLIPPER_CPU") != "baseline"
    and import_module("clipper_core.cpu_probe").has_avx2()
):
    __path__.insert(0, _AVX2)
