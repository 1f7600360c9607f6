"""Holders of models: a picture of a simulated mesh, as SVG by itself."""

import sys
from pathlib import Path

from bench.mesh_simulator.simulation import Simulation

WIDE, HIGH, LEFT, TOP = 4, 16, 130, 46  # pixels: of a model, of an instance, and around
MODELS = 240
LOADED, LOADING, PINNED = "#2563eb", "#f59e0b", "#7c3aed"


def write(path: Path, world: Simulation) -> None:
    """Write the picture: the most queried models from left to right, one instance per line, a mark
    where a model is loaded, and how full the instance is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(drawn(world))
    print(f"wrote {path}", file=sys.stderr)


def drawn(world: Simulation) -> str:
    nodes = list(world.nodes.values())
    ids = [world.name(n) for n in range(min(MODELS, world.plan.models))]
    width, height = LEFT + WIDE * len(ids) + 20, TOP + HIGH * (len(nodes) + 1) + 24
    copies = [sum(id in node.residents for node in nodes) for id in ids]
    title = (
        f"Who holds what: the {len(ids)} most asked of {world.plan.models} models, most asked first"
    )
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            ' font-family="sans-serif" font-size="10">'
        ),
        f'<rect width="{width}" height="{height}" fill="white"/>',
        (
            f'<text x="{LEFT}" y="16" font-size="12">{title}; {world.report.hit_ratio:.0%} of the'
            " queries found one loaded</text>"
        ),
        (
            f'<text x="{LEFT}" y="{TOP - 8}"><tspan fill="{LOADED}">loaded</tspan> <tspan'
            f' fill="{LOADING}">loading</tspan> <tspan fill="{PINNED}">pinned</tspan>; below, the'
            " number of copies</text>"
        ),
    ]
    for line, node in enumerate(nodes):
        y = TOP + HIGH * line
        full = node.residents.used_bytes / node.residents.capacity_bytes
        parts.append(f'<text x="4" y="{y + 11}">{node.id}: {len(node.residents)}</text>')
        parts.append(f'<rect x="68" y="{y + 3}" width="54" height="9" fill="#e5e7eb"/>')
        parts.append(
            f'<rect x="68" y="{y + 3}" width="{54 * full:.1f}" height="9" fill="#64748b"/>'
        )
        for place, id in enumerate(ids):
            held = node.residents.get(id)
            if held is not None:
                colour = LOADING if held.loading else PINNED if held.pinned else LOADED
                parts.append(
                    f'<rect x="{LEFT + WIDE * place}" y="{y}" width="{WIDE - 1}"'
                    f' height="{HIGH - 2}" fill="{colour}"/>'
                )
    y = TOP + HIGH * len(nodes)
    parts += [
        f'<rect x="{LEFT + WIDE * place}" y="{y + 4}" width="{WIDE - 1}" height="{5 * count}"'
        ' fill="#334155"/>'
        for place, count in enumerate(copies)
        if count
    ]
    return "\n".join([*parts, "</svg>", ""])
