"""Management over HTTP, on a listener of its own: what there is, and changing it. One function a verb; each says what it calls.

Further verbs add their routes to the same table. Who may: whoever reaches loopback, or has the token of `[http]`.
"""

import hmac
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec

from clipper.errors import InvalidInput
from clipper.frontend.messages import Outcome, Refused, Request, Response, Work, answer_json, read_json
from clipper.frontend.node import Node
from clipper.frontend.routes import Routes
from clipper.http_settings import HttpSettings, is_loopback
from clipper.types import Application

_TYPES = {key: type_ for key, type_ in get_type_hints(Application).items() if key not in ("name", "models")} | {"input": str}
_SETTINGS: "msgspec.json.Decoder[dict[str, Any]]" = msgspec.json.Decoder(dict[str, Any])


class Admin:
    """Threads: any. Every verb runs on a worker thread: the store may take its time."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def add_to(self, routes: Routes) -> None:
        for method, pattern, verb in (
            ("GET", "/admin/stats", self.stats),
            ("GET", "/admin/models", self.models),
            ("GET", "/admin/models/{}/stats", self.model_stats),
            ("GET", "/admin/applications", self.applications),
            ("GET", "/admin/applications/{}", self.application),
            ("GET", "/admin/applications/{}/stats", self.application_stats),
            ("PUT", "/admin/applications/{}", self.put_application),
            ("PATCH", "/admin/applications/{}", self.patch_application),
            ("DELETE", "/admin/applications/{}", self.delete_application),
        ):
            routes.add(method, pattern, on_worker(verb))

    def stats(self, request: Request) -> Response:
        return answer_json(self._node.stats())

    def application_stats(self, request: Request) -> Response:
        name = request.params[0]
        self._node.catalog.application(name)
        return answer_json(self._node.stats()["applications"].get(name, {}))

    def model_stats(self, request: Request) -> Response:
        """Of `svm:3`, or of the latest `svm`."""
        model = self._node.catalog.view.model(request.params[0])
        return answer_json(self._node.stats()["models"].get(str(model.id), {}))

    def models(self, request: Request) -> Response:
        stats = self._node.stats()["models"]
        rows = [self._model(model, stats.get(str(model.id), {})) for model in self._node.catalog.models()]
        return answer_json({"models": rows})

    def _model(self, model: Any, row: dict[str, Any]) -> dict[str, Any]:
        linked = [app.name for app in self._node.catalog.view.linking(model)]
        record = {**_record(model), "input": str(model.input), "applications": linked}
        return {**record, "wanted": row.get("wanted", 0), "has": row.get("has", 0)}

    def applications(self, request: Request) -> Response:
        return answer_json({"applications": [_application(app) for app in self._node.catalog.applications()]})

    def application(self, request: Request) -> Response:
        return answer_json(_application(self._node.catalog.application(request.params[0])))

    def put_application(self, request: Request) -> Response:
        """Makes it, or sets what the body names; what it does not name stays."""
        name = request.params[0]
        is_new = name not in self._node.catalog.view.applications
        self._set(request)
        return answer_json(_application(self._node.catalog.application(name)), 201 if is_new else 200)

    def patch_application(self, request: Request) -> Response:
        name = request.params[0]
        self._node.catalog.application(name)
        self._set(request)
        return answer_json(_application(self._node.catalog.application(name)))

    def _set(self, request: Request) -> None:
        settings = _settings(request)
        models = _models_of(settings)
        self._node.set_application(request.params[0], models, **settings)

    def delete_application(self, request: Request) -> Response:
        self._node.catalog.unregister_application(request.params[0])
        return Response(204, b"")


def on_worker(verb: Callable[[Request], Response]) -> Callable[[Request], Outcome]:
    return lambda request: Work(lambda: verb(request))


def _settings(request: Request) -> dict[str, Any]:
    settings: dict[str, Any] = read_json(_SETTINGS, request.body or b"{}")
    if settings.pop("name", request.params[0]) != request.params[0]:
        raise InvalidInput("the body names another application than the path.", hint="Leave `name` out.")
    for key in settings.keys() & _TYPES.keys():
        try:
            settings[key] = msgspec.convert(settings[key], _TYPES[key])
        except msgspec.ValidationError as error:
            raise InvalidInput(f"`{key}`: {error}.") from None
    return settings


def _models_of(settings: dict[str, Any]) -> tuple[str, ...] | None:
    """Taken out of `settings`. None leaves the links as they are; a new application begins with none."""
    models = settings.pop("models", None)
    if models is not None and not (isinstance(models, list) and all(isinstance(model, str) for model in models)):
        raise InvalidInput("`models` is a list of names, as ['svm', 'rf:3'].")
    return None if models is None else tuple(models)


def _application(app: Application) -> dict[str, Any]:
    return {**_record(app), "input": str(app.input), "models": [str(model) for model in app.models]}


def _record(record: msgspec.Struct) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(record)
    plain.pop("schema", None)
    return plain


def guard(settings: HttpSettings) -> Callable[[Request], None]:
    """Raises Refused for who may not manage. With a token: who does not know it. Without: what a web page could have sent, for a
    browser on this host reaches loopback too (its Origin, or a Host that only its resolver took for ours)."""
    expected = f"Bearer {settings.token}".encode()

    def check(request: Request) -> None:
        if settings.token:
            given = request.headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, expected):
                hint = "Send Authorization: Bearer, and the value of http.token."
                raise Refused(401, "management needs the token.", hint, ((b"www-authenticate", b"Bearer"),))
            return
        host = request.headers.get(b"host", b"localhost").decode("ascii", "replace")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if b"origin" in request.headers or not is_loopback(name):
            raise Refused(403, "management takes no requests of web pages or under other names.", "Set http.token to allow them.")

    return check
