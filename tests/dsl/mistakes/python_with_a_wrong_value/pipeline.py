from dsl.pipeline import Pipeline
from ops.ingest.op import Ingest


def pipeline():
    p = Pipeline("p")
    p.node("ingest", Ingest(source=3, seed="x"))
    return p
