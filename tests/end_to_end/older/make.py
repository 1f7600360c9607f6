"""Makes a catalog with learned states, to see that later versions read it.

The archives in this folder were made by version 0.1.0 (commit d1a9a0b), for each kind of store:

    cd / && PYTHON_OF_THAT_VERSION make.py STATE FOLDER OUT

STATE and FOLDER are as for `clipper.start`. OUT gets expected.json: what the server answered. The
archive of Redis has a dump.rdb, that of etcd its folder of data.
"""

import json
import sys
from pathlib import Path

import clipper

WORDS = [f"wO{i}rd" for i in range(8)]
PATIENCE_S = 60.0


def main(state: str, folder: str, out: Path) -> None:
    """Deploy models without files of their own, let applications learn, and write the answers."""
    settings = {"slo_ms": 5000, "default": "none", "input": "str"}
    with clipper.start(state=state, folder=folder, mesh=True, warmup=False) as server:
        server.deploy("a", "numpy.char:upper", input="str")
        server.deploy("a", "numpy.char:lower", input="str")
        server.manage.rollback("a")
        server.deploy("b", "numpy.char:lower", input="str")
        server.deploy("c", "numpy.char:swapcase", input="str")
        server.deploy("f", "numpy:ravel", input="f64[1]")
        server.deploy("g", "numpy:ravel", input="f64[1]")
        server.app("one", models=["a"], **settings)
        server.app("fixed", models=["a:2"], decider="first", **settings)
        server.app("votes", models=["a", "b", "c"], policy="ensemble", **settings)
        server.app("learns", models=["a", "b", "c"], policy="mixture", **settings)
        server.app("stacks", models=["a", "b"], policy="stacking", **settings)
        server.app("picks", models=["a", "b", "c"], policy="exp3", **settings)
        server.app("fits", models=["f", "g"], policy="ridge", slo_ms=5000, default=-1.0)
        for i in range(40):
            word = f"xY{i % 7}"
            for name in ("learns", "stacks", "picks"):
                app = server.app(name)
                app.feedback(app.predict(word).result(PATIENCE_S), label=word.upper())
                answer = app.predict(word, user="odd").result(PATIENCE_S)
                app.feedback(answer, label=word.lower())
            app = server.app("fits")
            app.feedback(app.predict([float(i % 7)]).result(PATIENCE_S), label=2.0 * (i % 7))
        for name in ("m1", "m2"):
            server.mesh.register(name, "numpy:ravel", type="python", input="f64[1]")
        server.mesh.set_vmodel("best", "m1", sync=True)
        (out / "expected.json").write_text(json.dumps(told(server)))


def told(server: clipper.ClipperServer) -> dict[str, object]:
    """Return what a server says of these applications. Policies that choose by chance have shares
    only."""
    answers = {}
    for name in ("one", "fixed", "votes", "learns", "stacks"):
        for user in (None, "odd"):
            futures = [server.app(name).predict(word, user=user) for word in WORDS]
            found = [future.result(PATIENCE_S) for future in futures]
            answers[f"{name} {user}"] = [(one.output, one.confidence) for one in found]
    fits = [server.app("fits").predict([float(i)]) for i in range(8)]
    answers["fits"] = [(future.result(PATIENCE_S).output, 0.0) for future in fits]
    stats = server.stats()
    learned = {
        f"{name} {user}": {str(id): share for id, share in server.app(name).shares(user).items()}
        for name in ("learns", "stacks", "picks", "fits")
        for user in (None, "odd")
    }
    return {
        "answers": answers,
        "shares": learned,
        "models": sorted(stats["models"]),
        "applications": sorted(stats["applications"]),
        "verbs": [entry["verb"] for entry in server.manage.history()],
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
