"""The references of a training that captures its own features."""

from dsl.op import Ref

ONLINE = {"batches": Ref("shard"), "target": Ref("target"), "tokens": Ref("tokenize"), "capture": "online"}
