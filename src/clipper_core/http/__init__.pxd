# The HTTP server of the hot path: plain predictions are answered without the GIL. Queries to
# several models, or for users, are read and written without it.
#
# May import: runtime, tls, wire, cache, learning, results, scheduling, engine, application.
#
# `http_server` has the worker threads and their epoll loops, `http_connection` one connection,
# `http_head` the parser of request heads, `http_route` the table of routes, the state of a query,
# and the bodies of the Open Inference Protocol. `key_table` has the keys that queries need,
# `trace_parent` reads and writes trace contexts.
# `query_waits` waits for the queries of many clients.
# `http2_protocol` has the rules of HTTP/2, with `hpack`, `http2_head` and `http2_answer`; its
# sockets are those of `http_connection`, or Python's (frontend/http/http2.py).
# `hot_calls` answers plain calls of ModelInfer among the events of HTTP/2, by routes of the same
# kind; `infer_call` reads and writes them.
# `json_value` reads and writes JSON without Python objects, `protobuf` the fields of messages of
# protobuf, and `infer_message` those of ModelInfer as Python objects.
#
# A request that is not plain (another route, a chunked body), or has no valid key, is passed
# to Python with its bytes.
#
# Threads: the workers of `http_server`, without the GIL. Tables of routes are replaced as a whole.
