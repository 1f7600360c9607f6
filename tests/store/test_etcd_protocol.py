"""The compiled protocol is that of etcd.proto. `python tests/store/test_etcd_protocol.py` compiles
it anew."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "python" / "clipper" / "store" / "etcd" / "protocol"


def compile_to(target: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{FOLDER}",
        "--include_imports",
        f"--descriptor_set_out={target}",
    ]
    subprocess.run([*command, "etcd.proto"], check=True)


def test_the_compiled_form_is_that_of_the_file(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="pip install grpcio-tools")
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    compile_to(tmp_path / "etcd.binpb")
    now, then = (
        FileDescriptorSet.FromString((at / "etcd.binpb").read_bytes()) for at in (tmp_path, FOLDER)
    )
    assert now == then, "python tests/store/test_etcd_protocol.py"


if __name__ == "__main__":
    compile_to(FOLDER / "etcd.binpb")
