"""LitServe: one worker process a route, batching."""

import sys

import litserve
from models import BATCH_MAX, MODELS, WAIT_MS


class Served(litserve.LitAPI):
    def __init__(self, name: str, **settings: float) -> None:
        super().__init__(api_path=f"/{name}", **settings)
        self.name = name

    def setup(self, device: str) -> None:
        self.model = MODELS[self.name]

    def decode_request(self, request: dict[str, list[float]]) -> list[float]:
        return request["input"]

    def batch(self, inputs: list[list[float]]) -> list[list[float]]:
        return inputs

    def unbatch(self, outputs: list[float]) -> list[float]:
        return outputs

    def predict(self, rows: list[list[float]]) -> list[float]:
        return self.model(rows)

    def encode_response(self, output: float) -> dict[str, float]:
        return {"output": output}


if __name__ == "__main__":
    apis = [Served(name, max_batch_size=BATCH_MAX, batch_timeout=WAIT_MS / 1000) for name in MODELS]
    server = litserve.LitServer(apis, accelerator="cpu", workers_per_device=1, timeout=20)
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        generate_client_file=False,
        log_level="error",
        access_log=False,
    )
