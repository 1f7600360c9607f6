"""The environment of the processes that a server starts: what a program needs to run, and none of
the server's secrets.

A server's environment has its own settings (`CLIPPER_HTTP__TOKEN`), and often credentials of its
operator (`AWS_SECRET_ACCESS_KEY`, a database's URL). A model is other people's code, and pip runs
that of packages, so that a child gets the variables of a list. `server.env_pass` adds to it.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

# Patterns of names, as of a shell.
_OF_PROGRAMS: Final = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "HOSTNAME", "TERM", "NO_COLOR"),
    *("LANG", "LANGUAGE", "LC_*", "TZ", "TZDIR", "TMPDIR", "TMP", "TEMP"),
    *("LD_*", "DYLD_*", "GLIBC_TUNABLES", "MALLOC_*", "JE_*", "MIMALLOC_*"),
    *("ASAN_*", "LSAN_*", "TSAN_*", "UBSAN_*", "GCOV_*", "COVERAGE_*", "COV_CORE_*"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "XDG_*", "MPL*"),
    *("JAVA_HOME", "JAVA_TOOL_OPTIONS", "JDK_*", "R_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
_OF_NUMERICS: Final = (
    *("OMP_*", "GOMP_*", "KMP_*", "OPENBLAS_*", "GOTO_*", "MKL_*", "BLIS_*", "VECLIB_*"),
    *("NUMEXPR_*", "NUMBA_*", "NPY_*", "ARROW_*", "TBB_*", "DNNL_*", "ONEDNN_*", "ORT_*"),
    *("CUDA*", "NVIDIA*", "NCCL_*", "CUBLAS*", "CUDNN*", "NVTE_*", "ROC*", "HIP_*", "HSA_*"),
    *("TORCH*", "PYTORCH*", "TF_*", "TF2_*", "XLA_*", "JAX_*", "KERAS_*", "TRITON_*"),
    *("HF_HOME", "HF_HUB_*", "HF_DATASETS_*", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_*"),
    *("TOKENIZERS_*", "SENTENCE_TRANSFORMERS_HOME", "NLTK_DATA", "SKLEARN_*", "JOBLIB_*"),
    *("XGBOOST_*", "LIGHTGBM_*", "TVM_*", "OPENVINO_*"),
)
OF_PIP: Final = (
    *("PIP_*", "UV_*", "CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "MAKEFLAGS"),
    *("CARGO_*", "RUSTUP_*", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC", "SOURCE_DATE_EPOCH"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "PKG_CONFIG_PATH"),
    *("http_proxy", "https_proxy", "no_proxy", "all_proxy"),
)
# Of model hosts, which pull models; and the settings of their adapters (docs/models.md).
OF_HOSTS: Final = (
    *("CLIPPER_OIP_*", "CLIPPER_ARTIFACTS__*"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT", "AWS_ENDPOINT_URL*", "NETRC"),
    *("AWS_SKIP_SIGNATURE", "STORAGE_EMULATOR_HOST"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)
# Of servers, which pull models (docs/models.md); a process with models in it does not get these.
OF_ARTIFACTS: Final = (
    *("AWS_*", "GOOGLE_*", "GCS_*", "STORAGE_EMULATOR_HOST", "AZURE_*", "HF_TOKEN", "NETRC"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)
_PATTERNS_MAX: Final = 64  # of which the compiled form is kept: each start of a child needs it
_SECRET: Final = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY")


def child_environment(
    more: Iterable[str] = (),
    *,
    patterns: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return what a child gets of this process's environment, or of the one given.

    more: names, or patterns such as `MODEL_*`, that the operator has chosen; they hold for any
    name. patterns: those of the kind of child (`OF_PIP`). Of these and of the usual ones, names
    that speak of a secret are left out.
    """
    chosen = _matching(tuple(more))
    usual = _matching((*_OF_PROGRAMS, *_OF_NUMERICS, *patterns))
    given = os.environ if environment is None else environment
    return {
        name: value
        for name, value in given.items()
        if chosen.match(name) or (usual.match(name) and not _SECRET.search(name.upper()))
    }


@lru_cache(_PATTERNS_MAX)
def _matching(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")
