"""Write what the image of a server is built from, and build it.

    make image                             clipper/server:VERSION, from the wheels of dist/
    make image ARGS="--tag mine/clipper:1 --extras redis,onnx"
    make image ARGS="--write"              the folder dist/image alone

The Dockerfile is the one of `clipper export`, and pip takes our distributions from the wheels of
`make wheels`. Docker or podman builds, whichever answers.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from projects import ROOT

from clipper.deploy.docker.image import write_files
from clipper.deploy.kubernetes.images import EXTRAS, SERVER_IMAGE, server_dockerfile

DIST = ROOT / "dist"
ENGINES = ("docker", "podman")


def write(folder: Path, wheels: list[Path], extras: list[str]) -> None:
    """Write the Dockerfile and the wheels, instead of what the folder had."""
    shutil.rmtree(folder, ignore_errors=True)
    files = {f"wheels/{wheel.name}": wheel.read_bytes() for wheel in wheels}
    write_files(folder, {"Dockerfile": server_dockerfile(extras), **files})


def engine() -> str:
    """Return the command of the first engine that answers. Raises SystemExit."""
    for name in ENGINES:
        if shutil.which(name):
            asked = subprocess.run([name, "version"], capture_output=True, check=False)
            if asked.returncode == 0:
                return name
    raise SystemExit(
        "neither docker nor podman answers here. The folder is complete: docker build dist/image"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the image of a server.")
    parser.add_argument("--tag", default=SERVER_IMAGE, help=f"name of the image ({SERVER_IMAGE})")
    parser.add_argument(
        "--extras", default=",".join(EXTRAS), help=f"of clipper-serving ({','.join(EXTRAS)})"
    )
    parser.add_argument("--base", default="", help="a base image with Python instead of the usual")
    parser.add_argument("--write", action="store_true", help="write dist/image and build nothing")
    arguments = parser.parse_args()
    wheels = sorted(DIST.glob("*.whl"))
    if not wheels:
        raise SystemExit("there are no wheels in dist/. Run: make wheels")
    folder = DIST / "image"
    write(folder, wheels, [one for one in arguments.extras.split(",") if one])
    print(f"wrote {folder.relative_to(ROOT)}", flush=True)
    if arguments.write:
        return 0
    base = ["--build-arg", f"BASE={arguments.base}"] if arguments.base else []
    return subprocess.run(
        [engine(), "build", *base, "-t", arguments.tag, str(folder)], check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
