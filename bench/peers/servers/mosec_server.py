"""mosec: a Rust front, one Python worker a route."""

import sys

from models import BATCH_MAX, MODELS, WAIT_MS
from mosec import Runtime, Server, Worker


class Noop1(Worker):
    model = staticmethod(MODELS["noop1"])

    def forward(self, data: list[dict[str, list[float]]]) -> list[dict[str, float]]:
        return [{"output": value} for value in self.model([one["input"] for one in data])]


class Noop784(Noop1):
    model = staticmethod(MODELS["noop784"])


class Linear(Noop1):
    model = staticmethod(MODELS["linear"])


if __name__ == "__main__":
    sys.argv[1:] = [
        "--port",
        sys.argv[1],
        "--address",
        "127.0.0.1",
        "--timeout",
        "20000",
        "--log-level",
        "error",
    ]
    server = Server()
    workers = (Noop1, Noop784, Linear)
    runtimes = [
        Runtime(worker, num=1, max_batch_size=BATCH_MAX, max_wait_time=WAIT_MS)
        for worker in workers
    ]
    server.register_runtime(
        {f"/{runtime.worker.__name__.lower()}": [runtime] for runtime in runtimes}
    )
    server.run()
