"""MLServer: the Open Inference Protocol, in its own process (its pool of workers needs an older
uvloop), batching."""

import json
import os
import socket
import sys
from pathlib import Path

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from models import BATCH_MAX, MODELS, WAIT_MS

HERE = Path(__file__).resolve().parent


class Served(MLModel):
    async def load(self) -> bool:
        self._model = MODELS[self.name]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = NumpyCodec.decode_input(payload.inputs[0])
        import numpy

        output = NumpyCodec.encode_output("output", numpy.asarray(self._model(rows)))
        return InferenceResponse(model_name=self.name, outputs=[output])


def written(folder: Path, port: int) -> Path:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = {"http_port": port, "grpc_port": free.getsockname()[1]}
    settings = {
        "debug": False,
        "host": "127.0.0.1",
        "metrics_endpoint": None,
        "parallel_workers": 0,
        **ports,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    for name in MODELS:
        (folder / name).mkdir()
        batches = {"max_batch_size": BATCH_MAX, "max_batch_time": WAIT_MS / 1000}
        model = {"name": name, "implementation": "mlserver_server.Served", **batches}
        (folder / name / "model-settings.json").write_text(json.dumps(model))
    return folder


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(HERE)
    place = written(Path(os.environ["PEER_FOLDER"]), int(sys.argv[1]))
    os.execv(str(Path(sys.executable).parent / "mlserver"), ["mlserver", "start", str(place)])
