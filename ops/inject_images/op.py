"""Declaration of `inject_images`: the image goes into the first user turn."""

from __future__ import annotations

from attrs import frozen, validators

from dsl.op import field, op
from ops.artifacts import ImageSamples, Samples


@op(version=1, run="ops.inject_images.run:inject_images", key_libraries=("pillow",), single_process=True)
@frozen(kw_only=True)
class InjectImages:
    """Put each sample's image into its first user turn, after checking that it can be decoded."""

    samples: Samples
    max_image_pixels: int = field(
        default=64_000_000, validator=validators.ge(1), help="larger images are dropped and counted"
    )
    min_image_side: int = field(default=2, validator=validators.ge(1), help="smaller images are dropped and counted")
    max_dropped: int | None = field(
        default=None, validator=validators.optional(validators.ge(0)), help="fail when more samples are dropped"
    )
    output = ImageSamples
