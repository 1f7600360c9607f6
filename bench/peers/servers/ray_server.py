"""Ray Serve: a proxy, and a replica a route, batching."""

import logging
import sys
import time
from typing import Any

import ray
from models import BATCH_MAX, MODELS, WAIT_MS
from ray import serve


class Served:
    def __init__(self, name: str) -> None:
        self.model = MODELS[name]
        logging.getLogger("ray.serve").setLevel(logging.ERROR)

    @serve.batch(max_batch_size=BATCH_MAX, batch_wait_timeout_s=WAIT_MS / 1000)
    async def batched(self, rows: list[list[float]]) -> list[float]:
        return self.model(rows)

    async def __call__(self, request: Any) -> dict[str, float]:
        return {"output": await self.batched((await request.json())["input"])}


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=2, _temp_dir=None)
    deployment = serve.deployment(
        num_replicas=1, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1}
    )(Served)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    for each in MODELS:
        serve.run(deployment.bind(each), name=each, route_prefix=f"/{each}")
    while True:
        time.sleep(1)
