"""Models of other inference servers (Triton, MLServer, OpenVINO, TensorFlow Serving)."""

from clipper_container.adapters.oip.runtime import Oip, ServerFailed

__all__ = ["Oip", "ServerFailed"]
