"""The dashboard for Grafana, as JSON: `clipper export grafana`.

Grafana requests the Prometheus data source when the dashboard is imported.
"""

from typing import Final

_WIDTH, _HEIGHT, _COLUMNS = 12, 8, 2
_APPS: Final = 'application=~"$application"'
_MODELS: Final = 'model=~"$model"'


def _quantile(q: str, metric: str, which: str, by: str) -> str:
    return (
        f"histogram_quantile({q}, sum by (le, {by})"
        f" (rate({metric}_bucket{{{which}}}[$__rate_interval])))"
    )


def _rate(metric: str, which: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{{{which}}}[$__rate_interval]))"


def _share_right(stem: str, which: str, by: str) -> str:
    """Return the share of right ones in the feedback of two counters, over an hour."""
    right, all = (
        f"sum by ({by}) (increase({stem}{end}{{{which}}}[1h]))"
        for end in ("_right_total", "_total")
    )
    return f"{right} / {all}"


def _skew(metric: str) -> str:
    each = f"sum by (shard) (rate({metric}[$__rate_interval]))"
    return f"max({each}) / avg({each})"


_MODEL_NAME = "{{model}}:{{version}}"

# row -> (title, unit, ((expression, legend), ...)), ...
_PANELS: Final[dict[str, tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...]]] = {
    "Applications": (
        (
            "Queries",
            "reqps",
            ((_rate("clipper_queries_total", _APPS, "application"), "{{application}}"),),
        ),
        (
            "Answers by outcome",
            "reqps",
            (
                (
                    _rate("clipper_answers_total", _APPS, "application, outcome"),
                    "{{application}} {{outcome}}",
                ),
            ),
        ),
        (
            "Latency and SLO",
            "s",
            (
                (
                    _quantile("0.5", "clipper_answer_duration_seconds", _APPS, "application"),
                    "{{application}} p50",
                ),
                (
                    _quantile("0.99", "clipper_answer_duration_seconds", _APPS, "application"),
                    "{{application}} p99",
                ),
                (f"clipper_slo_seconds{{{_APPS}}}", "{{application}} SLO"),
            ),
        ),
        (
            "Accuracy, by feedback",
            "percentunit",
            (
                (
                    _share_right("clipper_feedback", _APPS, "application"),
                    "{{application}}",
                ),
                (
                    _share_right(
                        "clipper_model_feedback",
                        f"{_APPS}, {_MODELS}",
                        "application, model, version",
                    ),
                    f"{{{{application}}}} {_MODEL_NAME}",
                ),
            ),
        ),
        (
            "Selection",
            "percentunit",
            (
                (
                    f"clipper_selection_share{{{_APPS}, {_MODELS}}}",
                    f"{{{{application}}}} {_MODEL_NAME}",
                ),
            ),
        ),
        (
            "Feedback",
            "reqps",
            ((_rate("clipper_feedback_total", _APPS, "application"), "{{application}}"),),
        ),
    ),
    "Models": (
        (
            "Tasks by outcome",
            "reqps",
            (
                (
                    _rate("clipper_tasks_total", _MODELS, "model, version, outcome"),
                    f"{_MODEL_NAME} {{{{outcome}}}}",
                ),
            ),
        ),
        (
            "Latency",
            "s",
            (
                (
                    _quantile("0.5", "clipper_task_duration_seconds", _MODELS, "model, version"),
                    f"{_MODEL_NAME} p50",
                ),
                (
                    _quantile("0.99", "clipper_task_duration_seconds", _MODELS, "model, version"),
                    f"{_MODEL_NAME} p99",
                ),
            ),
        ),
        (
            "Rows in a batch, on average",
            "short",
            (
                (
                    f"{_rate('clipper_batch_rows_sum', _MODELS, 'model, version')} / "
                    f"{_rate('clipper_batch_rows_count', _MODELS, 'model, version')}",
                    _MODEL_NAME,
                ),
                (f"clipper_batch_rows_limit{{{_MODELS}}}", f"{_MODEL_NAME} limit"),
            ),
        ),
        (
            "Queue",
            "short",
            ((f"clipper_queue_rows{{{_MODELS}}}", _MODEL_NAME),),
        ),
        (
            "Cache hits",
            "percentunit",
            (
                (
                    f"{_rate('clipper_cache_hits_total', _MODELS, 'model, version')} / "
                    f"({_rate('clipper_cache_hits_total', _MODELS, 'model, version')} + "
                    f"{_rate('clipper_tasks_total', _MODELS, 'model, version')})",
                    _MODEL_NAME,
                ),
            ),
        ),
        (
            "Containers",
            "short",
            (
                (f"clipper_replicas_ready{{{_MODELS}}}", f"{_MODEL_NAME} ready"),
                (f"clipper_replicas_wanted{{{_MODELS}}}", f"{_MODEL_NAME} wanted"),
                (
                    "sum by (model, version) "
                    f"(increase(clipper_container_restarts_total{{{_MODELS}}}[$__rate_interval]))",
                    f"{_MODEL_NAME} restarts",
                ),
            ),
        ),
    ),
    "Mesh, where there is one": (
        (
            "Hits",
            "percentunit",
            (
                (
                    "sum by (instance) "
                    '(rate(clipper_mesh_queries_total{outcome="hit"}[$__rate_interval])) / '
                    "sum by (instance) (rate(clipper_mesh_queries_total[$__rate_interval]))",
                    "{{instance}}",
                ),
            ),
        ),
        (
            "Loads by outcome",
            "ops",
            (
                (
                    _rate("clipper_mesh_loads_total", "", "instance, outcome"),
                    "{{instance}} {{outcome}}",
                ),
            ),
        ),
        (
            "Wait for a load",
            "s",
            (
                (
                    _quantile("0.5", "clipper_mesh_load_wait_seconds", "", "instance"),
                    "{{instance}} p50",
                ),
                (
                    _quantile("0.99", "clipper_mesh_load_wait_seconds", "", "instance"),
                    "{{instance}} p99",
                ),
            ),
        ),
        (
            "How full",
            "percentunit",
            (("clipper_mesh_used_bytes / clipper_mesh_capacity_bytes", "{{instance}}"),),
        ),
        (
            "Age of the least recently used model",
            "s",
            (("clipper_mesh_lru_age_seconds", "{{instance}}"),),
        ),
        (
            "Models",
            "short",
            (
                ("clipper_mesh_models_held", "{{instance}} holds"),
                ("max(clipper_mesh_models_registered)", "registered"),
                ("clipper_mesh_loads_waiting", "{{instance}} waiting loads"),
            ),
        ),
    ),
    "Parameters, where there are shards": (
        (
            "Rows pulled and pushed",
            "ops",
            (
                (
                    _rate("clipper_params_pulled_rows_total", "", "table, outcome"),
                    "{{table}} pulled, {{outcome}}",
                ),
                (_rate("clipper_params_pushed_rows_total", "", "table"), "{{table}} pushed"),
            ),
        ),
        (
            "Pulls and pushes by shard",
            "reqps",
            (
                (_rate("clipper_params_pulls_total", "", "shard"), "{{shard}} pulls"),
                (_rate("clipper_params_pushes_total", "", "shard"), "{{shard}} pushes"),
            ),
        ),
        (
            "Skew: the busiest shard beside the mean",
            "short",
            (
                (_skew("clipper_params_pulled_rows_total"), "rows pulled"),
                (_skew("clipper_params_pushed_rows_total"), "rows pushed"),
                (
                    "max(sum by (shard) (clipper_params_rows)) / avg(sum by (shard) "
                    "(clipper_params_rows))",
                    "rows held",
                ),
            ),
        ),
        (
            "Rows",
            "short",
            (
                ("sum by (table) (clipper_params_rows)", "{{table}}"),
                (
                    _rate("clipper_params_evicted_rows_total", "", "table"),
                    "{{table}} evicted a second",
                ),
                (
                    _rate("clipper_params_expired_rows_total", "", "table"),
                    "{{table}} expired a second",
                ),
            ),
        ),
        (
            "How old gradients are, in versions",
            "short",
            (
                (
                    _quantile("0.5", "clipper_params_push_lag_versions", "", "shard"),
                    "{{shard}} p50",
                ),
                (
                    _quantile("0.99", "clipper_params_push_lag_versions", "", "shard"),
                    "{{shard}} p99",
                ),
            ),
        ),
        (
            "Refused",
            "reqps",
            (
                (
                    _rate("clipper_params_refused_total", "", "shard, reason") + " > 0",
                    "{{shard}} {{reason}}",
                ),
            ),
        ),
        (
            "How far replicas are behind",
            "s",
            (("clipper_params_replica_lag_seconds", "{{shard}} in {{replica}}"),),
        ),
        (
            "Lives, snapshots",
            "s",
            (
                ("clipper_params_snapshot_age_seconds", "{{shard}} age of its snapshot"),
                ("clipper_params_snapshot_last_duration_seconds", "{{shard}} took for it"),
                ("clipper_params_recovery_last_duration_seconds", "{{shard}} took to recover"),
            ),
        ),
        (
            "Memory of shards",
            "bytes",
            (
                ("clipper_params_resident_bytes", "{{shard}} process"),
                ("clipper_params_bytes", "{{shard}} parameters"),
            ),
        ),
        (
            "Shards",
            "short",
            (
                ("sum(clipper_params_shard_up)", "up"),
                ("sum(clipper_params_shard_ready)", "serve"),
                ("sum(clipper_params_shard_exposed)", "exposed"),
                (
                    "sum by (shard) (changes(clipper_params_epoch[$__rate_interval]))",
                    "{{shard}} began anew",
                ),
            ),
        ),
    ),
    "Server": (
        (
            "HTTP requests",
            "reqps",
            ((_rate("clipper_http_requests_total", "", "route, code"), "{{route}} {{code}}"),),
        ),
        (
            "HTTP p99",
            "s",
            (
                (
                    _quantile(
                        "0.99", "clipper_http_request_duration_seconds", 'listener="query"', "route"
                    ),
                    "{{route}}",
                ),
            ),
        ),
        (
            "gRPC calls",
            "reqps",
            (
                (
                    _rate("clipper_grpc_requests_total", "", "service, method, code"),
                    "{{service}}/{{method}} {{code}}",
                ),
            ),
        ),
        (
            "gRPC p99",
            "s",
            (
                (
                    _quantile(
                        "0.99", "clipper_grpc_request_duration_seconds", "", "service, method"
                    ),
                    "{{service}}/{{method}}",
                ),
            ),
        ),
        (
            "Memory",
            "bytes",
            (
                ("process_resident_memory_bytes and on (instance) clipper_build_info", "server"),
                ("clipper_cache_bytes", "cache"),
                ("clipper_queue_bytes", "queues"),
                ("clipper_journal_bytes", "journal, on disk"),
                (f"clipper_container_memory_bytes{{{_MODELS}}}", _MODEL_NAME),
            ),
        ),
        (
            "CPU",
            "short",
            (
                (
                    "rate(process_cpu_seconds_total[$__rate_interval]) and on (instance) "
                    "clipper_build_info",
                    "cores of the server",
                ),
            ),
        ),
    ),
}


def dashboard() -> dict[str, object]:
    """Return the dashboard in the format that Grafana 9 and later import."""
    panels: list[dict[str, object]] = []
    top = 0
    for row, of_row in _PANELS.items():
        panels.append(
            {
                "type": "row",
                "title": row,
                "collapsed": False,
                "gridPos": _place(0, top, 24, 1),
                "panels": [],
            }
        )
        for i, (title, unit, queries) in enumerate(of_row):
            place = _place(
                _WIDTH * (i % _COLUMNS), top + 1 + _HEIGHT * (i // _COLUMNS), _WIDTH, _HEIGHT
            )
            panels.append(_panel(title, unit, queries, place))
        top += 1 + _HEIGHT * -(-len(of_row) // _COLUMNS)
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "__inputs": [
            {
                "name": "DS_PROMETHEUS",
                "label": "Prometheus",
                "type": "datasource",
                "pluginId": "prometheus",
            }
        ],
        "title": "Clipper",
        "uid": "clipper",
        "tags": ["clipper"],
        "schemaVersion": 38,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "editable": True,
        "panels": panels,
        "templating": {
            "list": [
                _choice("application", "clipper_queries_total"),
                _choice("model", "clipper_tasks_total"),
            ]
        },
    }


def _place(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


_SOURCE: Final = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def _panel(
    title: str, unit: str, queries: tuple[tuple[str, str], ...], place: dict[str, int]
) -> dict[str, object]:
    targets: list[dict[str, object]] = [
        {
            "refId": chr(ord("A") + i),
            "expr": expression,
            "legendFormat": legend,
            "datasource": _SOURCE,
        }
        for i, (expression, legend) in enumerate(queries)
    ]
    field = {"defaults": {"unit": unit, "min": 0}, "overrides": []}
    about = {"type": "timeseries", "title": title, "datasource": _SOURCE, "gridPos": place}
    return {**about, "fieldConfig": field, "targets": targets}


def _choice(label: str, metric: str) -> dict[str, object]:
    query = f"label_values({metric}, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": query,
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
