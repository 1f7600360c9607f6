"""Answers to the requests and events of other nodes."""

import msgspec

from clipper.mesh.decision_log import DecisionLog
from clipper.mesh.loading.loader import ModelLoader
from clipper.mesh.node.usage_reports import UsageRecorder
from clipper.mesh.registry import now_ms
from clipper.mesh.transport.channel import Message, RequestFailed


class PeerRequests:
    """Serves the verbs that transport/peers.py describes. Threads: the event loop."""

    def __init__(self, loader: ModelLoader, recorder: UsageRecorder, log: DecisionLog) -> None:
        self._loader, self._recorder, self._log = loader, recorder, log

    async def answer(self, verb: str, message: Message) -> Message:
        """Return the answer to a request. Failed when it cannot be met."""
        loader, id = self._loader, str(message.get("model", ""))
        used_ms, copies = int(message.get("used_ms", 0)), int(message.get("copies", 1))
        match verb:
            case "lend":
                if message.get("load") or loader.is_loading(id):
                    await loader.load(id, used_ms or now_ms(), waiting=True, copies=copies)
                await loader.lend(id, str(message["address"]), str(message["token"]))
            case "load":
                waiting = bool(message.get("waiting"))
                await loader.load(id, used_ms, waiting=waiting, copies=copies)
            case "unlend":
                await loader.unlend(id, str(message["address"]))
            case "explain":
                return {"history": [msgspec.to_builtins(one) for one in self._log.of(id)]}
            case _:
                raise RequestFailed(f"no verb {verb!r}", "none")
        return {}

    def on_event(self, message: Message) -> None:
        """Handle an event."""
        if message.get("event") == "digest":
            self._recorder.add(message.get("used", ()))
