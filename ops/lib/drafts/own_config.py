"""The trial of the config.py of an algorithm of the user's: all that it has is called once. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dsl.errors import ConfigError
from dsl.op_table import own_algorithms
from ops.lib.drafts.algorithms import Algorithm, algorithm_class, own_options, part_of, place_in
from ops.lib.drafts.backbone.config import DraftConfig, from_serving, to_serving
from ops.lib.drafts.layout import Layout

BLOCK_SIZE = 8  # of the draft that config.py is tried with
# What a training logs under train/ and val/ beside the algorithm's metrics.
LOGGED = {
    *("loss", "accuracy", "expected_tau", "tau", "lr", "grad_norm", "anchors", "anchors_per_second"),
    *("tokens_per_second", "samples_without_anchor", "nonfinite_steps", "memory_gigabytes", "mfu", "wait_share"),
    "time_share",
}
LOGGED_OF_SLOTS = ("accuracy_slot_", "loss_slot_")


def try_config(name: str) -> None:
    """Call all that an algorithm's config.py defines, for a draft of usual sizes. Raises ConfigError for the first
    fault.
    """
    cls = algorithm_class(name)
    own_options(name)
    with placed(f"{own_algorithms()[name] / 'config.py'}: {cls.__name__}"):
        own = cls()  # every field needs a default
        texts = {each: getattr(own, each) for each in ("name", "architecture", "engine", "source")}
        expect(all(isinstance(text, str) for text in texts.values()), f"expected strings, got {texts}")
        expect(own.name == name, f'name: it is "{own.name}"; expected the name of the folder, "{name}"')
        for metrics in (own.metrics(True), own.metrics(False)):
            is_texts = isinstance(metrics, tuple) and all(isinstance(metric, str) for metric in metrics)
            expect(is_texts, f"metrics returned {metrics!r}; expected a tuple of strings")
            taken = [metric for metric in metrics if metric in LOGGED or metric.startswith(LOGGED_OF_SLOTS)]
            expect(not taken, f"metrics: {', '.join(taken)}: of every training: rename it")
            expect(len(set(metrics)) == len(metrics), f"metrics: a name stands twice in {metrics}")
        layout = own.layout(BLOCK_SIZE)
        expect(isinstance(layout, Layout), f"layout returned {layout!r}; expected a Layout (ops/lib/drafts/layout.py)")
        wanted = f"expected {BLOCK_SIZE - 1} slots that predict: a block's tokens without the anchor"
        expect(layout.proposals == BLOCK_SIZE - 1, f"layout({BLOCK_SIZE}) has {layout.proposals}; {wanted}")
        config = draft_config(own, BLOCK_SIZE, layers=2)
        serving = to_serving(config)
        read = from_serving(serving)
        expect(read == config, f"from_serving makes {read.algorithm} of what to_serving wrote of {own}")
        shapes = part_of(own, "config:shapes")(serving)
        expect(isinstance(shapes, dict), f"shapes returned {shapes!r}; expected a dict of tuples by tensors' names")
        for table in ("MISSING", "WRONG"):
            expect(isinstance(part_of(own, f"config:{table}"), dict), f"{table}: expected a table of texts")
        flops = own.slot_flops(config)
        expect(isinstance(flops, int | float), f"slot_flops returned {flops!r}; expected a number")


def draft_config(algorithm: Algorithm, block_size: int, layers: int) -> DraftConfig:
    """A draft config for trying an algorithm: usual hidden size and vocabulary, but narrow layers.

    Raises ConfigError for sizes of the algorithm that do not fit.
    """
    return DraftConfig(
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        vocab_size=32000,
        block_size=block_size,
        mask_token_id=0,
        target_layer_ids=(0, 1),
        num_target_layers=4,
        max_position_embeddings=4096,
        algorithm=algorithm,
    )


def expect(is_so: bool, what: str) -> None:
    """Raise ConfigError with the message `what` if the condition is false."""
    if not is_so:
        raise ConfigError(what)


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Open a context that turns any error into ConfigError, with the place in the user's code, or else `place`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error) if place.partition(":")[0] in str(error) else f"{place}: {error}") from error
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{place_in(error) or f'{place}: '}{type(error).__name__}: {error}") from error
