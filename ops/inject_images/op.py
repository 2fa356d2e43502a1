"""Declaration of `inject_images`: where images stand in a conversation, and which can be used."""

from __future__ import annotations

from typing import Literal

from attrs import frozen, validators

from dsl.op import field, op
from ops.artifacts import ImageSamples, Samples


@op(
    version=1,
    run="ops.inject_images.run:inject_images",
    key_libraries=("pillow",),
    single_process=True,
)
@frozen(kw_only=True)
class InjectImages:
    """Put each sample's images where the policy wants them, after checking that they can be decoded."""

    samples: Samples
    image_policy: Literal["first-user-turn", "in-place"] = field(
        default="first-user-turn",
        help='"first-user-turn": one image, at the start of the first user turn; samples with more are dropped and '
        'counted. "in-place": any number, each where its placeholder stands',
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
        help="images checked at the same time; all cores unless given. The result does not depend on it",
    )
    output = ImageSamples
