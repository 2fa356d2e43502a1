"""Declaration of `ingest`: conversations and their images, from a file or from the built-in sample."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from attrs import frozen, validators

from dsl.op import field, op, seed_field
from ops.artifacts import Samples
from ops.ingest.jsonl import named_images


@op(version=1, run="ops.ingest.run:ingest", key_libraries=("pillow",), single_process=True)
@frozen(kw_only=True)
class Ingest:
    """Read conversations and their images, and give every sample a split."""

    source: str = field(
        external=True,
        help='a JSONL file, or "builtin:digits": 1,797 real handwritten digits with questions, and text-only prose',
    )
    val_fraction: float = field(
        default=0.02,
        validator=validators.and_(validators.ge(0), validators.lt(1)),
        help="share of the samples without a given split that goes to val, by hash of the id",
    )
    test_fraction: float = field(
        default=0.1,
        validator=validators.and_(validators.ge(0), validators.lt(1)),
        help="the same for test",
    )
    max_samples: int | None = field(
        default=None,
        validator=validators.optional(validators.ge(1)),
        help="take only this many samples of each category, spread over the splits",
    )
    max_dropped: int | None = field(
        default=None, validator=validators.optional(validators.ge(0)), help="fail when more samples are dropped"
    )
    seed: int | None = seed_field()
    output = Samples

    def __attrs_post_init__(self) -> None:
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError("val_fraction and test_fraction leave nothing to train on: together they must be below 1")

    def external_files(self) -> Iterable[Path]:
        """The images that the JSONL file names, or the files that hold the data of the built-in sample."""
        if self.source == "builtin:digits":
            return builtin_files()
        source = Path(self.source)
        return sorted(set(named_images(source))) if source.is_file() else ()


def builtin_files() -> tuple[Path, ...]:
    """scikit-learn's digits and the standard library's prose, found without importing either."""
    sklearn, prose = find_spec("sklearn"), find_spec("pydoc_data.topics")
    files = [Path(sklearn.origin).parent / "datasets" / "data" / "digits.csv.gz"] if sklearn and sklearn.origin else []
    return (*files, *([Path(prose.origin)] if prose and prose.origin else []))
