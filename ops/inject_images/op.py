"""Declaration of `inject_images`: decodes images, checks them, and places them in the conversations."""

from __future__ import annotations

from typing import Literal

from attrs import frozen, validators

from dsl.op import field, op
from ops.artifacts import ImageSamples, Samples


@op(
    version=2,
    run="ops.inject_images.run:inject_images",
    key_libraries=("pillow",),
    single_process=True,
)
@frozen(kw_only=True)
class InjectImages:
    """Decode each sample's images, check them, and place them by the policy."""

    samples: Samples
    image_policy: Literal["first-user-turn", "in-place"] = field(
        default="first-user-turn",
        help='"first-user-turn": one image, at the start of the first user turn; samples with more, or with one '
        'in the result of a tool, are dropped and counted. "in-place": any number, each at its placeholder',
    )
    max_image_pixels: int = field(
        default=64_000_000, validator=validators.ge(1), help="larger images are dropped and counted"
    )
    min_image_side: int = field(default=2, validator=validators.ge(1), help="smaller images are dropped and counted")
    max_dropped: int | None = field(
        default=None, validator=validators.optional(validators.ge(0)), help="fail when more samples are dropped"
    )
    workers: int | None = field(
        default=None,
        neutral=True,
        validator=validators.optional(validators.ge(1)),
        help="images checked at the same time; default: the number of cores. Does not affect the result",
    )
    output = ImageSamples
