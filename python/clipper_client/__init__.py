"""A client for the queries of a Clipper server: pure Python, without dependencies, on any platform.

with clipper_client.Client("http://127.0.0.1:8000") as client:
    answer = client.predict("digits", [0.0, 1.0], slo_ms=20)

Where `clipper` is installed, `clipper.Client` is the same class. docs/client.md.
"""

from clipper_client import errors
from clipper_client.answers import Answer, AnswerPart, Answers, FeedbackCounts
from clipper_client.async_client import AsyncClient
from clipper_client.client import Client
from clipper_client.errors import ClipperError
from clipper_client.parts import AnswerParts, AsyncAnswerParts
from clipper_client.version import VERSION as __version__

__all__ = [
    "Answer",
    "AnswerPart",
    "AnswerParts",
    "Answers",
    "AsyncAnswerParts",
    "AsyncClient",
    "Client",
    "ClipperError",
    "FeedbackCounts",
    "__version__",
    "errors",
]
