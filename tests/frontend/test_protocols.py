"""The compiled protocols are those of the .proto files. `python tests/frontend/test_protocols.py`
compiles them anew."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "python" / "clipper" / "frontend" / "protocols"


def compile_to(target: Path) -> None:
    files = sorted(path.name for path in FOLDER.glob("*.proto"))
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{FOLDER}",
        "--include_imports",
        f"--descriptor_set_out={target}",
    ]
    subprocess.run([*command, *files], check=True)


def test_the_compiled_form_is_that_of_the_files(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="pip install grpcio-tools")
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    compile_to(tmp_path / "protocols.binpb")
    now, then = (
        FileDescriptorSet.FromString((at / "protocols.binpb").read_bytes())
        for at in (tmp_path, FOLDER)
    )
    mine = [file.name for file in now.file if not file.name.startswith("google/")]
    names = (
        "applications",
        "health",
        "inference",
        "mesh",
        "modelmesh",
        "pserver",
        "reflection",
        "status",
    )
    assert mine == [f"{name}.proto" for name in names]
    for one, other in zip(now.file, then.file, strict=True):
        assert one.name.startswith("google/") or one == other, (
            f"{one.name} has changed: python tests/frontend/test_protocols.py"
        )


def test_other_definitions_of_the_same_messages_may_be_in_the_process() -> None:
    pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")
    other = pytest.importorskip("tritonclient.grpc", reason="pip install 'tritonclient[grpc]'")
    protocols = pytest.importorskip(
        "clipper.frontend.protocols", reason="pip install 'clipper-serving[grpc]'"
    )
    assert protocols.message("inference.ModelInferRequest")(id="7").id == "7"
    assert other is not None


def test_field_numbers_are_those_of_the_protocol() -> None:
    pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")
    triton = pytest.importorskip(
        "tritonclient.grpc.service_pb2", reason="pip install 'tritonclient[grpc]'"
    )
    from clipper.frontend.protocols import pool

    theirs = triton.DESCRIPTOR.pool
    inference = pool().FindFileByName("inference.proto")
    compared = 0
    for name, ours in inference.message_types_by_name.items():
        other = theirs.FindMessageTypeByName(f"inference.{name}")
        for field in ours.fields:
            match = other.fields_by_name[field.name]
            assert (field.number, field.type) == (match.number, match.type), field.full_name
            compared += 1
    service = theirs.FindServiceByName("inference.GRPCInferenceService")
    for method in inference.services_by_name["GRPCInferenceService"].methods:
        match = service.methods_by_name[method.name]
        assert (method.client_streaming, method.server_streaming) == (
            match.client_streaming,
            match.server_streaming,
        )
        assert method.input_type.full_name == match.input_type.full_name
        assert method.output_type.full_name == match.output_type.full_name
    assert compared > 60


if __name__ == "__main__":
    compile_to(FOLDER / "protocols.binpb")
