"""A graph as a picture in a file. Imported by name only when one is asked for: it loads networkx and matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import networkx
from matplotlib.figure import Figure

from dsl.graph import Graph
from executor.graph_text import levels, rows_of

COLOURS = {"cached": "#b7e1cd", "runs": "#fce8b2", "may be cut off": "#c9daf8"}
OTHER = "#eeeeee"
WIDTH, HEIGHT = 2.4, 1.1  # inches of a node with what is around it
BEND = 0.25  # of edges that pass by other levels


def save_picture(graph: Graph, states: Mapping[str, str], file: Path) -> None:
    """Write a PNG, SVG or PDF, by the end of the name: the data flows down, a level to a row."""
    parents = {node.id: node.parents for node in graph.nodes.values()}
    level = levels(parents)
    rows = {-depth: row for depth, row in rows_of(parents, level).items()}
    drawing = networkx.DiGraph((parent, node_id) for node_id, ids in parents.items() for parent in ids)
    drawing.add_nodes_from(parents)
    most = max(map(len, rows.values()), default=1)
    figure = Figure(figsize=(WIDTH * (most + 1), HEIGHT * (len(rows) + 1)))
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_title(graph.name)
    places = networkx.multipartite_layout(drawing, subset_key=rows, align="horizontal")
    for is_long, bend in ((False, 0.0), (True, BEND)):
        edges = [(here, there) for here, there in drawing.edges if (level[there] - level[here] > 1) == is_long]
        networkx.draw_networkx_edges(
            drawing,
            places,
            edgelist=edges,
            ax=axes,
            arrows=True,
            node_size=1400,
            edge_color="#999999",
            connectionstyle=f"arc3,rad={bend}",
        )
    for node_id, (x, y) in places.items():
        state = states.get(node_id, "")
        shown = "\n".join(filter(None, (node_id, state)))
        box = {"boxstyle": "round,pad=0.4", "facecolor": COLOURS.get(state, OTHER), "edgecolor": "#666666"}
        axes.text(x, y, shown, ha="center", va="center", fontsize=9, bbox=box)
    figure.savefig(file, bbox_inches="tight", dpi=120)
