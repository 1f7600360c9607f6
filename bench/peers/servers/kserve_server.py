"""KServe's server for Python models: its protocol of version 1, no batching."""

import sys
from typing import Any

from kserve import Model, ModelServer
from models import MODELS


class Served(Model):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ready = True

    def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:
        return {"predictions": MODELS[self.name](payload["instances"])}


if __name__ == "__main__":
    server = ModelServer(
        http_port=int(sys.argv[1]), enable_grpc=False, workers=1, access_log_format=None
    )
    server.start([Served(name) for name in MODELS])
