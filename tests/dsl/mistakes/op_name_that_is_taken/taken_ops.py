from attrs import frozen

from dsl.op import op
from ops.artifacts import Samples


@op(version=1, run="x:y")
@frozen(kw_only=True)
class Ingest:
    output = Samples
