"""granian with orjson: no batching; what one writes in ten lines."""

import sys
from typing import Any

import orjson
from models import MODELS

_HEADERS = [(b"content-type", b"application/json")]


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    answer = orjson.dumps({"output": MODELS[scope["path"][1:]]([orjson.loads(body)["input"]])[0]})
    headers = [*_HEADERS, (b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


if __name__ == "__main__":
    from granian import Granian
    from granian.constants import Interfaces

    port = int(sys.argv[1])
    Granian(
        "granian_server:app",
        address="127.0.0.1",
        port=port,
        interface=Interfaces.ASGINL,
        log_enabled=False,
    ).serve()
