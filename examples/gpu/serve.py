"""A network on a GPU, or on the CPU where there is none.

The container prints the device, how each batch size runs (captured as a CUDA graph, or eagerly and
why), and the memory.

Run: python examples/gpu/serve.py
"""

from pathlib import Path

import numpy as np

import clipper


def main() -> None:
    """Serve 2000 images."""
    folder = str(Path(__file__).parent)
    with clipper.start() as server:
        network = server.deploy(
            "network",
            "network:model",  # network.py beside this file; it is imported in the container only
            code=[folder],
            batching={"mode": "fit", "size_max": 64},
            cache=False,
        )
        server.wait_ready(timeout=120)
        images = np.random.default_rng(1).random((2000, 3, 32, 32), np.float32)
        outputs = network.predict_many(images, slo_ms=60_000).result(60)
        print(f"{len(images)} images, outputs of shape {outputs.shape}")


if __name__ == "__main__":
    main()
