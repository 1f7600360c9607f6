"""No wait of the product lasts for ever because whoever should end it has died.

Found by syntax: waits without a limit, threads that no component looks after, and the order
wait, look, clear, which erases a wake-up. What is allowed stands below with its reason; an entry
that nothing needs any more fails too.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.style import parsed
from tests.test_tidy import CLIENT, CODE, PACKAGE, ROOT, SDK, dotted

# calls that wait without a limit when they have no argument
UNLIMITED: Final = ("wait", "join", "result", "get", "acquire", "exception")
COMPONENT: Final = PACKAGE / "component"

# file: {function: why it may wait without a limit}
WAITS: Final[dict[str, dict[str, str]]] = {
    "container_sdk/src/clipper_container/calls.py": {
        "PendingCall.__await__": "a call that has ended",
    },
    "container_sdk/src/clipper_container/current.py": {
        "current_evaluation": "no wait: a variable of the context",
        "is_cancelled": "no wait: a variable of the context",
    },
    "container_sdk/src/clipper_container/worker/async_model.py": {
        "CoroutineLoop.run": "a coroutine of the model: the server gives it up as a batch",
    },
    "container_sdk/src/clipper_container/worker/inbox.py": {
        "FrameInbox.look": "bytes have arrived",
    },
    "container_sdk/src/clipper_container/host/control.py": {
        "ModelHost._answer": "a callback of the future, which is done",
        "ModelHost._load": "a callback of the future, which is done",
    },
    "container_sdk/src/clipper_container/host/model_cache.py": {
        "ModelCache._load_all": "a loader waits for work; close() puts an entry for each",
    },
    "container_sdk/src/clipper_container/host/model_sizes.py": {
        "ModelSizes._enter": "for a step that is under way, whose `finally` tells its end",
    },
    "container_sdk/src/clipper_container/host/server_connection.py": {
        "relay.done": "a callback of the future, which is done",
    },
    "container_sdk/src/clipper_container/host/server_connections.py": {
        "_print_error": "a callback of the future, which is done",
    },
    "container_sdk/src/clipper_container/host/worker_pool.py": {
        "WorkerPool._run": "a follower waits to lead; the leader releases it, also when it ends",
    },
    "container_sdk/src/clipper_container/threads.py": {
        "CallPool._run": "waits for calls; close() puts an entry for each thread",
    },
    "container_sdk/src/clipper_container/worker/turns.py": {
        "Turns.__enter__": "the one before releases it in __exit__",
    },
    "python/clipper/cli/mesh/cluster.py": {
        "up": "a command runs until a signal",
    },
    "python/clipper/cli/monitoring/top.py": {
        "_Reader.stop": "its thread sleeps on the event that was set; reads have timeouts",
    },
    "python/clipper/cli/params/on_ray.py": {
        "up_on_ray": "a command runs until a signal",
        "resharding_on_ray": "a command whose work is the thread",
    },
    "python/clipper/cli/servers/serve.py": {
        "serve": "a command runs until a signal",
    },
    "python/clipper/deploy/docker/daemon.py": {
        "Daemon._build": "it ends at the limit of the build, or at the event that was set",
    },
    "python/clipper/deploy/ray/ingress.py": {
        "Ingress.__init__": "an actor of Ray, which Ray ends",
        "Ingress.close": "an actor of Ray, which Ray ends",
    },
    "python/clipper/frontend/grpc/calls.py": {
        "_until": "a task that is done",
    },
    "python/clipper/frontend/http/listeners.py": {
        "HttpListeners._settle": "a callback of the future, which is done",
    },
    "python/clipper/frontend/streams/scoring.py": {
        "RecordScorer._result": "a query, which ends at its deadline",
    },
    "python/clipper/load/open_loop.py": {
        "send_on_time": "a task that is done",
    },
    "python/clipper/mesh/loading/loader.py": {
        "ModelLoader._new_job": "a callback of the task, which is done",
        "ModelLoader._make_room": "a task that is done",
    },
    "python/clipper/mesh/loading/record_writer.py": {
        "RecordWriter._add": "a callback of the task, which is done",
    },
    "python/clipper/mesh/node/joined_node.py": {
        "JoinedNode.start_hosts": "coroutines, for a wait with a timeout",
    },
    "python/clipper/mesh/routing/copy_locator.py": {
        "CopyLocator._search": "coroutines, for waits with a timeout",
    },
    "python/clipper/mesh/transport/channel.py": {
        "PeerChannel.request": "a future that is done",
    },
    "python/clipper/params/client/client.py": {
        "Client.pull_tables": "a request to a shard, which ends at answer_s",
        "Client.pull_variables": "a request to a shard, which ends at answer_s",
        "Client.push_gradients": "a request to a shard, which ends at answer_s",
    },
    "python/clipper/params/shard/replication/followers.py": {
        "FollowerState.start_waiting": "no wait: tells the core to reply at once",
    },
    "python/clipper/params/shard/server.py": {
        "run": "a process runs until its shard ends; ShardServer.wait polls",
        "ShardServer._keep_copies": "ReplicaFollower.join has a limit of its own",
    },
    "python/clipper/params/torch.py": {
        "PulledRows.rows": "a request to a shard, which ends at answer_s",
        "Worker.step": "a request to a shard, which ends at answer_s",
    },
    "python/clipper/selection/learning/off_policy.py": {
        "evaluate": "no wait: an evaluator's result",
    },
    "python/clipper/serving/feedback/observe.py": {
        "_query_again": "a query, which ends at its deadline",
    },
    "python/clipper/serving/query/progress.py": {
        "progress": "a query, which ends at its deadline",
    },
    "python/clipper/serving/rollout/decoys.py": {
        "Recorder._run": "waits for records; close() puts an entry",
    },
    "python/clipper/store/history.py": {
        "is_dry_run": "no wait: a context variable",
        "enter": "no wait: a context variable",
    },
}

# file: {function: why its thread is not a component}
THREADS: Final[dict[str, dict[str, str]]] = {
    "container_sdk/src/clipper_container/host/timers.py": {
        "Timers.after": "no thread: an entry of the one that runs",
    },
    "container_sdk/src/clipper_container/threads.py": {
        "KeptThread.__init__": "the component of the SDK: its function runs again after any error",
    },
    "python/clipper/cli/catalog/models.py": {
        "_progress": "prints while a command waits",
    },
    "python/clipper/cli/monitoring/top.py": {
        "_Reader.__init__": "reads while a command shows",
    },
    "python/clipper/cli/params/on_ray.py": {
        "resharding_on_ray": "the work of a command",
    },
    "python/clipper/deploy/docker/daemon.py": {
        "Daemon._build": "ends a build at its limit",
    },
    "python/clipper/deploy/ray/ingress.py": {
        "Ingress.__init__": "an actor of Ray, which Ray starts again",
    },
    "python/clipper/serving/feedback/states.py": {
        "States._read": "one read with a limit; the caller goes on without it",
    },
    "python/clipper/serving/query/decider_threads.py": {
        "DeciderPool._find_hands": "code of a user that may never return; another takes its place",
    },
}

# file: {class: why a thread of its own is not a component}
THREAD_CLASSES: Final[dict[str, dict[str, str]]] = {
    "container_sdk/src/clipper_container/worker/all_servers.py": {
        "_Server": "AllServers.run looks at its error again and again, and raises it",
    },
}

# file: {function: who sees the end of the task that it starts itself, not by Tasks}
TASKS: Final[dict[str, dict[str, str]]] = {
    "container_sdk/src/clipper_container/worker/async_answers.py": {
        "ConnectionTasks._start": "kept by the id of its frame; its error ends the connection",
    },
    "python/clipper/deploy/ray/ingress.py": {
        "Ingress._run": "an actor of Ray, whose log has the error",
    },
    "python/clipper/frontend/grpc/calls.py": {
        "GrpcDispatcher.in_order": "awaited, or cancelled, by the call that it belongs to",
        "GrpcDispatcher.in_order.read": "awaited by the call that it belongs to",
        "_until": "awaited, or cancelled, where it is started",
    },
    "python/clipper/frontend/grpc/mesh_watch.py": {
        "MeshWatchService.watch": "cancelled by the call that it belongs to",
    },
    "python/clipper/frontend/params_grpc/shard_client.py": {
        "LocalShardConnection.open": "its end is in ShardGrpc.health(), and ends the shard",
    },
    "python/clipper/load/open_loop.py": {
        "send_on_time": "cancelled where it is started",
    },
    "python/clipper/load/runs.py": {
        "_run": "prints the progress of a load, and is cancelled at its end",
    },
    "python/clipper/mesh/loading/model_host.py": {
        "HostProcess._has_started": "it logs each error, and then has the process replaced",
    },
    "python/clipper/mesh/node/joined_node.py": {
        "JoinedNode.start_hosts": "cancelled where it is started",
    },
    "python/clipper/mesh/transport/channel.py": {
        "PeerChannel.start": "it logs each error, and then closes the channel",
        "PeerChannel._take": "it answers each error",
    },
    "python/clipper/serving/query/future_watcher.py": {
        "FutureWatcher.on_done": "its end calls the callback",
    },
}

# file: {function: why it may look between a wait and a clear}
CLEARS: Final[dict[str, dict[str, str]]] = {
    "python/clipper/manage/mesh/watch.py": {
        "Watcher._send": "what it sends next sets it again when there is room",
    },
}


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Return each function by its qualified name, and the module's own statements as ``."""

    def inside(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                qualified = f"{name}.{child.name}" if name else child.name
                if not isinstance(child, ast.ClassDef):
                    yield qualified, child
                yield from inside(child, qualified)
            elif not isinstance(child, ast.expr):
                yield from inside(child, name)

    yield from inside(tree, "")


def own_nodes(function: ast.AST) -> list[ast.AST]:
    """Return the nodes of a function without those of functions inside it, in their order."""
    found, left = [], list(ast.iter_child_nodes(function))[::-1]
    while left:
        node = left.pop()
        found.append(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            left.extend(list(ast.iter_child_nodes(node))[::-1])
    return found


@functools.cache
def functions_of(path: Path) -> list[tuple[str, list[ast.AST]]]:
    """Return the functions of a file, with what each consists of."""
    return [(name, own_nodes(function)) for name, function in functions(parsed(path))]


def waits_of(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Return the waits without a limit: line and call. What is awaited can be cancelled."""
    awaited = {id(node.value) for node in nodes if isinstance(node, ast.Await)}
    inside = {  # asyncio.wait_for(event.wait(), 1), ensure_future(event.wait())
        id(argument)
        for node in nodes
        if isinstance(node, ast.Call) and "asyncio" in dotted(node.func)
        for argument in node.args
    }
    for node in nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, arguments = node.func.attr, len(node.args) + len(node.keywords)
        if id(node) in awaited or id(node) in inside:
            continue
        if (name in UNLIMITED and not arguments) or (name == "wait_for" and arguments == 1):
            yield node.lineno, f"{dotted(node.func)}()"
        elif name in UNLIMITED and any(
            isinstance(one.value, ast.Constant) and one.value.value is None
            for one in node.keywords
            if one.arg == "timeout"
        ):
            yield node.lineno, f"{dotted(node.func)}(timeout=None)"
        elif dotted(node.func) == "threading.Barrier" and arguments < 2:
            yield node.lineno, "threading.Barrier() without a timeout"


def threads_of(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Return the places that make threads or pools themselves."""
    for node in nodes:
        if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in (
            "Thread",
            "Timer",
            "ThreadPoolExecutor",
        ):
            yield node.lineno, dotted(node.func)


def tasks_of(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Return the places that start tasks of an event loop themselves."""
    for node in nodes:
        if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in (
            "create_task",
            "ensure_future",
        ):
            yield node.lineno, dotted(node.func)


def thread_classes(tree: ast.Module) -> Iterator[tuple[str, ast.ClassDef]]:
    """Return the classes that are threads, with their names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(
            dotted(base).rpartition(".")[2] in ("Thread", "Timer") for base in node.bases
        ):
            yield node.name, node


def erased_wakeups(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Return each `X.clear()` after a look at something else, of an X that was waited for."""
    waited: dict[str, int] = {}
    looked = False
    for node in nodes:
        if isinstance(node, ast.If | ast.While):
            looked = bool(waited) and isinstance(node, ast.If)
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = dotted(node.func.value)
        if node.func.attr == "wait":
            waited[owner], looked = node.lineno, False
        elif node.func.attr == "clear" and owner in waited and looked:
            yield node.lineno, f"{owner}.clear() after a look"


CHECKS: Final = {
    "wait": waits_of,
    "thread": threads_of,
    "task": tasks_of,
    "clear": erased_wakeups,
}


def found(
    kind: str, allowed: dict[str, dict[str, str]], files: list[Path]
) -> tuple[list[str], list[str]]:
    """Return what is not allowed, and which entries nothing needs."""
    check = CHECKS[kind]
    wrong, needed = [], set()
    for path in files:
        place = path.relative_to(ROOT).as_posix()
        for name, nodes in functions_of(path):
            for line, what in check(nodes):
                if name in allowed.get(place, {}):
                    needed.add((place, name))
                else:
                    wrong.append(f"{place}:{line}: {name}: {what}")
    entries = {(place, name) for place, each in allowed.items() for name in each}
    return wrong, sorted(f"{place}: {name}" for place, name in entries - needed)


FILES: Final = [
    path
    for path in CODE
    if path.suffix == ".py"
    and any(map(path.is_relative_to, (PACKAGE, CLIENT, SDK)))
    and not path.is_relative_to(COMPONENT)
]


@pytest.mark.slow  # it reads every file
def test_no_wait_is_without_a_limit() -> None:
    wrong, stale = found("wait", WAITS, FILES)
    assert not wrong, "give it a limit, or a reason in WAITS:\n" + "\n".join(wrong)
    assert not stale, "not needed in WAITS:\n" + "\n".join(stale)


def test_threads_are_components() -> None:
    wrong, stale = found("thread", THREADS, FILES)
    assert not wrong, "use clipper.component, or give a reason in THREADS:\n" + "\n".join(wrong)
    assert not stale, "not needed in THREADS:\n" + "\n".join(stale)


def test_no_class_is_a_thread() -> None:
    seen = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in FILES
        for name, _ in thread_classes(parsed(path))
    }
    assert seen == {(place, name) for place, each in THREAD_CLASSES.items() for name in each}


def test_tasks_are_kept() -> None:
    wrong, stale = found("task", TASKS, FILES)
    assert not wrong, (
        "use clipper.component.Tasks, or say who sees its end in TASKS:\n" + "\n".join(wrong)
    )
    assert not stale, "not needed in TASKS:\n" + "\n".join(stale)


def test_no_wakeup_is_erased() -> None:
    wrong, stale = found("clear", CLEARS, FILES)
    assert not stale, "not needed in CLEARS:\n" + "\n".join(stale)
    assert not wrong, "take a Flag, or clear before looking:\n" + "\n".join(wrong)


# -- the rules notice what they are for


def lines(check: str, source: str) -> list[int]:
    each = functions(ast.parse(source))
    return [line for _, function in each for line, _ in CHECKS[check](own_nodes(function))]


def test_a_wait_without_a_limit_is_seen() -> None:
    source = (
        "async def f(self):\n    await e.wait()\n    await asyncio.wait_for(e.wait(), 1)\n"
        "    e.wait(1)\n    e.wait()\n    t.join()\n    ','.join(x)\n    q.get()\n    d.get(1)\n"
        "    fut.result()\n    c.wait_for(p)\n    c.wait_for(p, 1)\n    q.get(timeout=None)\n"
        "    threading.Barrier(3)\n    lock.acquire()\n    lock.acquire(timeout=1)\n"
    )
    assert lines("wait", source) == [5, 6, 8, 10, 11, 13, 14, 15]


def test_a_thread_of_ones_own_is_seen() -> None:
    source = (
        "class A:\n    def f(self):\n        threading.Thread(target=g)\n        Worker('w', g)\n"
    )
    assert lines("thread", source) == [3]


def test_a_class_that_is_a_thread_is_seen() -> None:
    source = "class A(threading.Thread):\n    pass\nclass B(Worker):\n    pass\n"
    assert [name for name, _ in thread_classes(ast.parse(source))] == ["A"]


def test_a_task_of_ones_own_is_seen() -> None:
    source = (
        "async def f(self):\n    loop.create_task(g())\n    asyncio.ensure_future(g())\n"
        "    self.tasks.spawn(g())\n"
    )
    assert lines("task", source) == [2, 3]


def test_the_order_wait_look_clear_is_seen() -> None:
    wrong = (
        "def f(self):\n    while True:\n        e.wait()\n        if closing.is_set():\n"
        "            return\n        e.clear()\n"
    )
    right = "def f(self):\n    while not closing:\n        e.wait(1)\n        e.clear()\n"
    assert lines("clear", wrong) == [6]
    assert lines("clear", right) == []
