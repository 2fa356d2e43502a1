"""What is known of artifacts: promised by the `estimate` hooks of the ops before they exist, or read from them.

Both are statements of the same classes, and `conflicts` of an op's conflicts.py judges them: a plan calls it on what is
promised, a stage on what its inputs hold. None, or a split that is not named, is not known, and refuses nothing.
`identity` is the artifact's digest, or stands for it before it exists (dsl/estimate.py).

After a trial on a few samples, samples and tokens are counted as well, in the trial and for the full run: by kind,
since images and texts differ in size, and splits in number.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from dsl.errors import DataError
from dsl.estimate import PROMISED, Amount
from dsl.op import Artifact, is_builtin
from ops.lib.data.checkpoint_code import read_settings
from ops.lib.data.files import read_json, read_jsonl, read_object
from ops.lib.data.sample_account import SPLITS, summary_splits
from ops.lib.data.tool_forms import GIVEN
from ops.lib.drafts.backbone.config import DraftConfig, from_serving
from ops.lib.target.checkpoint_check import (
    processor_folder_mistakes,
    quantised_bytes,
    running_mistake,
    sizes_in,
    stored_tensors,
)
from ops.lib.target.mtp_tensors import mtp_mistake
from ops.lib.target.probed import Probe, heeded, kept_probes
from ops.lib.target.quantised import BY_SGLANG
from ops.lib.target.same_target import is_same_target
from ops.lib.target.sizes import TargetSizes, context_length, is_bounded, long_samples, rope_limit, too_long
from ops.lib.target.token_ids import GENERATION, foreign_tokens
from ops.lib.vision.family_config import is_qwen, text_part, with_defaults
from ops.lib.vision.processor_files import chosen_limits, image_settings, template_texts
from ops.lib.vision.template_kinds import WITH_TOOLS, shows_tools

MILLION = 1_000_000
SETTINGS = ("benchmark", "temperature", "block_size", "block_size_trained", "mtp", "eagle3")  # of an evaluation
FIRST_ROWS = 100  # of samples, by which it is known what rows have
ANSWERED = "answered.json"  # of samples that a target answered: the fields of Answered
PROMPTS_ONLY = "the tokens are prompts without answers, of which nothing is learnt: set prompts_only = false"

Kind = tuple[str, str]  # category ("image" or "text"), split


@frozen
class Counts:
    """The number of samples or the like by kind, in the trial run and in the full run."""

    trial: Mapping[Kind, float]
    full: Mapping[Kind, float]

    def of(self, splits: Iterable[str]) -> tuple[float, float]:
        """The sums over some splits, in the trial and in the full run."""
        chosen = self.only(splits)
        return sum(chosen.trial.values()), sum(chosen.full.values())

    def only(self, splits: Iterable[str]) -> Counts:
        chosen = set(splits)
        trial, full = (
            {kind: count for kind, count in counts.items() if kind[1] in chosen} for counts in (self.trial, self.full)
        )
        return Counts(trial, full)

    def amount(self, splits: Iterable[str] = SPLITS) -> Amount:
        return Amount(*self.of(splits))


@frozen(kw_only=True)
class TargetStated:
    """The facts that a target states: its config.json, image processor settings, and token ids, as far as known.

    generation: the settings of its generation_config.json, empty without one; None if not known. folder: the artifact's
    folder, once it exists. shows_tools: whether its chat template reads tools.
    """

    config: Mapping[str, Any]
    identity: str | None = None
    mask_token_id: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    pad_token_id: int | None = None
    image_settings: Mapping[str, Any] = {}
    generation: Mapping[str, Any] | None = None
    folder: Path | None = None
    shows_tools: bool | None = None

    @classmethod
    def read(cls, folder: Path, identity: str) -> TargetStated:
        """Read the facts of a committed target from its target.json and its checkpoint's config.json.

        identity: the digest of the artifact in `folder`. Raises DataError for files that cannot be read.
        """
        info, config = read_json(folder / "target.json"), read_target_config(folder / "model")
        return cls(
            config=config,
            identity=identity,
            mask_token_id=info["mask_token_id"],
            eos_token_ids=tuple(info["eos_token_ids"]),
            pad_token_id=text_part(config).get("pad_token_id"),
            image_settings=image_settings(folder / "model")[1],
            generation=read_settings(folder / "model" / GENERATION),
            folder=folder,
            shows_tools=shows_tools(template_texts(folder / "model")),
        )

    @property
    def tools_warning(self) -> str:
        """A text on samples with tools that no chat template shows; empty if it does, or if that is not known."""
        if self.shows_tools is not False:
            return ""
        return f"the target's chat template shows no tools, so samples with tools are dropped: {WITH_TOOLS}"

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of the config that describes the language model."""
        return text_part(self.config)

    def running_mistake(self, instead: str = BY_SGLANG) -> str:
        """A text on why transformers cannot run the target; empty if it can, or if that is not known yet.

        instead: what to do without running it.
        """
        return running_mistake(self.config, None if self.folder is None else self.folder / "model", instead)

    def mtp_mistake(self) -> str:
        """A text on why the target's own MTP head cannot be used; empty if it can, or if that is not known yet."""
        return "" if self.folder is None else mtp_mistake(self.config, stored_tensors(self.folder / "model"))

    @property
    def verifying_mistake(self) -> str:
        """A text on why answers by a draft are not the target's own, as load_target measured; empty if they are, if
        that is not known yet, and for Qwen's families, which are warned of only.
        """
        probe = self._probe
        return "" if probe is None else probe.unverified

    @property
    def unbatched_reason(self) -> str:
        """A text on why texts have to run one at a time, as load_target measured; empty under the conditions of
        `verifying_mistake`.
        """
        probe = self._probe
        return "" if probe is None else probe.unbatched

    @property
    def _probe(self) -> Probe | None:
        """What load_target measured last with all checks, of the weights if it could; None where that is not heeded."""
        probes = kept_probes(self.folder) if self.folder is not None and not is_qwen(self.config) else []
        return heeded(probes)

    @property
    def info(self) -> dict[str, int]:
        """The sizes of target.json that a draft has to fit."""
        text = self.text
        return {
            "hidden_size": text["hidden_size"],
            "vocab_size": text["vocab_size"],
            "num_layers": text["num_hidden_layers"],
        }


@frozen(kw_only=True)
class TargetForecast(TargetStated):
    """A target with its sizes, for estimates. No run function imports this, so that it is in no cache key.

    is_tried: the target comes from a trial run, trained for a few steps only. quantised_bytes: of quantised weights in
    the files; None for others, and where there are no files. checkpoint: the directory of its files; None without.
    """

    sizes: TargetSizes
    quantised_bytes: int | None = None
    is_tried: bool = False
    checkpoint: Path | None = None

    def running_mistake(self, instead: str = BY_SGLANG) -> str:
        """As of TargetStated, also before the target is in the store; mistakes of the files are reported elsewhere."""
        with suppress(OSError, DataError):
            return running_mistake(self.config, None if self.quantised_bytes is None else self.checkpoint, instead)
        return ""

    def mtp_mistake(self) -> str:
        """As of TargetStated, also before the target is in the store."""
        with suppress(OSError, DataError):
            stored = {} if self.checkpoint is None else stored_tensors(self.checkpoint)
            return mtp_mistake(self.config, stored) if stored else ""
        return ""

    @classmethod
    def of(cls, config: Mapping[str, Any], directory: Path | None = None, **known: Any) -> TargetForecast:
        """Forecast of a target with the sizes of its config, or of its directory. known: the other fields.

        Raises DataError for a config that lacks a size.
        """
        if directory is None:
            return cls(config=config, sizes=TargetSizes.of(config), **known)
        stored, sizes = quantised_bytes(config, directory), sizes_in(directory, config)
        return cls(config=config, sizes=sizes, quantised_bytes=stored, checkpoint=directory, **known)

    @classmethod
    def made(cls, folder: Path, identity: str, **known: Any) -> TargetForecast:
        """Read the forecast from a committed artifact."""
        stated = asdict(TargetStated.read(folder, identity), recurse=False)
        return cls.of(**stated, directory=folder / "model", **known)


@frozen(kw_only=True)
class Answered:
    """The settings with which a target answered samples.

    has_target: whether the target was a node's, None if unknown. target: its identity. chat_template: SHA-256 of the
    one given by the user. templates: SHA-256 of those in the processor's directory, None if unknown. processor: from
    `pinned_model`. longest: tokens that no single answer of the split train exceeds, None where answers of several
    samples count together, or some are not the target's. An artifact only records how the target was asked, so that
    a server's answers and those of a node's target can be the same artifact.
    """

    enable_thinking: bool | None
    history_reasoning: str = "kept"
    tools_as: str = GIVEN
    has_target: bool | None = None
    target: str | None = None
    chat_template: str | None = None
    templates: frozenset[str] | None = None
    processor: str | None = None
    longest: int | None = None

    @classmethod
    def read(cls, file: Path) -> Answered:
        """Read the settings from answered.json of an artifact."""
        asked = read_object(file)
        return cls(
            enable_thinking=asked.get("enable_thinking"),
            history_reasoning=asked.get("history_reasoning", "kept"),  # older artifacts have none
            tools_as=asked.get("tools_as", GIVEN),
        )


@frozen(kw_only=True)
class SamplesForecast:
    """A forecast of samples. empty: splits known to have none. samples: counted, after a trial.

    is_found: whether `empty` was found in samples, rather than set by a config. has_images: whether images were found
    in them. answered: the settings, if a target answered. has_tools: whether rows are known to have tools, by the first
    of them.
    """

    samples: Counts | None = None
    identity: str | None = None
    empty: frozenset[str] = frozenset()
    is_found: bool = False
    has_images: bool = False
    answered: Answered | None = None
    has_tools: bool = False

    @classmethod
    def read(cls, folder: Path, identity: str) -> SamplesForecast:
        """Read the forecast from a committed artifact."""
        counts, asked, rows = summary_splits(folder), folder / ANSWERED, folder / "samples.jsonl"
        return cls(
            identity=identity,
            empty=frozenset() if counts is None else frozenset(split for split in SPLITS if not counts.get(split)),
            is_found=True,
            has_images=any(folder.glob("images-*.bin")),
            answered=Answered.read(asked) if asked.is_file() else None,
            has_tools=rows.is_file() and any("tools" in row for row in islice(read_jsonl(rows), FIRST_ROWS)),
        )


@frozen(kw_only=True)
class TokensCounted:
    """The numbers of tokenised samples and of their tokens, known after a trial."""

    samples: Counts
    tokens: Counts

    def only(self, splits: Iterable[str]) -> TokensCounted:
        return TokensCounted(samples=self.samples.only(splits), tokens=self.tokens.only(splits))


@frozen(kw_only=True)
class TokensForecast:
    """A forecast of token shards. by_split: counted tokens, None before they exist. expected: stated by the user, or
    None.

    longest: tokens of the longest kept sample, and before they exist the most it may have; 0 if not known. is_bound:
    vocab_size is only an upper limit, for a built-in processor. counted: samples and tokens, after a trial. empty,
    is_found: as in SamplesForecast. eos_token_ids: None if the tokenizer is unknown. prompts_only: without answers.
    folder: the artifact's folder, once it exists.
    """

    by_split: Mapping[str, int] | None
    expected: int | None
    longest: int
    vocab_size: int | None
    counted: TokensCounted | None = None
    identity: str | None = None
    empty: frozenset[str] = frozenset()
    is_found: bool = False
    eos_token_ids: tuple[int, ...] | None = None
    pad_token_id: int | None = None
    is_bound: bool = False
    prompts_only: bool = False
    folder: Path | None = None

    @classmethod
    def read(cls, folder: Path, identity: str, longest: int = 0) -> TokensForecast:
        """Read the forecast from a committed artifact. longest: if the caller knows it."""
        info = read_json(folder / "tokens.json")
        by_split: Counter[str] = Counter()
        for shard in info["shards"]:
            by_split[shard["split"]] += shard["tokens"]
        return cls(
            by_split=by_split,
            expected=None,
            longest=longest,
            vocab_size=info["vocab_size"],
            identity=identity,
            empty=frozenset(split for split in SPLITS if not by_split[split]),
            is_found=True,
            eos_token_ids=tuple(info["eos_token_ids"]),
            pad_token_id=info["pad_token_id"],
            folder=folder,
        )

    def count(self, splits: tuple[str, ...]) -> int | None:
        """The number of tokens in the splits; the user's expected number is used for any splits."""
        if self.by_split is None:
            return self.expected
        return sum(self.by_split.get(split, 0) for split in splits)


@frozen(kw_only=True)
class FeaturesForecast:
    """A forecast of stored features: number of layers, dtype, and tokens. counted: as in TokensForecast.

    target_layer_ids and all later fields: None if unknown. target, of_tokens: identities. info: content of
    features.json, once it exists.
    """

    num_layers: int
    dtype: str
    tokens: TokensForecast | None
    counted: TokensCounted | None = None
    target_layer_ids: tuple[int, ...] | None = None
    identity: str | None = None
    target: str | None = None
    of_tokens: str | None = None
    final_hidden: bool | None = None
    empty: frozenset[str] = frozenset()
    info: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path, identity: str, tokens: TokensForecast | None = None) -> FeaturesForecast:
        """Read the forecast from a committed artifact. tokens: the forecast of the captured tokens."""
        info = read_json(folder / "features.json")
        kept = {shard["split"] for shard in info["shards"] if shard["samples"]}
        return cls(
            num_layers=len(info["target_layer_ids"]),
            dtype=info["dtype"],
            tokens=tokens,
            target_layer_ids=tuple(info["target_layer_ids"]),
            identity=identity,
            target=info["target"],
            of_tokens=info["tokens"],
            final_hidden=info["final_hidden"],
            empty=frozenset(SPLITS) - kept,
            info={name: value for name, value in info.items() if name != "shards"},
        )


def _not_counted() -> int | None:
    return None


@frozen(kw_only=True)
class StepsForecast:
    """A forecast of a plan of batches. steps, tokens_per_step: of the full run, known after a trial.

    of_tokens: the identity of the tokens that are batched, directly or as features. pad_multiple: None if unknown.
    count: the exact number of steps, which takes a while to count before the plan exists; None until it is known.
    """

    steps: Amount | None = None
    tokens_per_step: float = 0.0
    of_tokens: str | None = None
    pad_multiple: int | None = None
    count: Callable[[], int | None] = _not_counted

    @classmethod
    def read(cls, folder: Path, **known: Any) -> StepsForecast:
        """Read the forecast from a committed plan. known: of the other fields."""
        return cls(**known, count=partial(_steps_of_plan, folder))


def _steps_of_plan(folder: Path) -> int:
    steps: int = read_json(folder / "plan.json")["steps"]
    return steps


@frozen(kw_only=True)
class DraftForecast:
    """A forecast of a draft. dtype: of the stored weights.

    knows_layers: whether shape.target_layer_ids are right, not just their number. mask_token_id: the shape's, if it is
    right. target: the identity of the target that it was trained or imported for.
    """

    shape: DraftConfig
    dtype: str = "float32"
    knows_layers: bool = False
    mask_token_id: int | None = None
    identity: str | None = None
    target: str | None = None

    @classmethod
    def read(cls, folder: Path, identity: str) -> DraftForecast:
        """Read the forecast from a committed artifact: a serving directory, or the output of a training.

        identity: the artifact's digest. Raises ConfigError and DataError for a wrong config.
        """
        config = read_config(folder / "config.json")
        training = folder / "training.json"
        trained = read_json(training) if training.is_file() else {}
        record = config.get("dflow")
        target = trained.get("target") or (record.get("target") if isinstance(record, Mapping) else None)
        dtype, shape = config.get("dtype"), from_serving(config)
        return cls(
            shape=shape,
            mask_token_id=shape.mask_token_id,
            dtype=dtype if isinstance(dtype, str) else "float32",
            knows_layers=True,
            identity=identity,
            target=target if isinstance(target, str) else None,
        )


@frozen(kw_only=True)
class ReportForecast:
    """A forecast of an evaluation: the number of prompts per category (None: all), new tokens for each, and the dtype.

    inputs: the identities of the artifacts that it reads, by edge. settings: other fields that influence it, as far as
    known.
    """

    max_prompts: int | None
    max_new_tokens: int
    dtype: str
    inputs: Mapping[str, str | None] = {}
    settings: Mapping[str, Any] = {}

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> ReportForecast:
        """Read the forecast from a report.json."""
        return cls(
            max_prompts=None,
            max_new_tokens=report["max_new_tokens"],
            dtype=report["dtype"],
            inputs=report["inputs"],
            settings={name: value for name, value in report.items() if name in SETTINGS},
        )


def by_field(mistakes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Mistakes grouped for the result of a hook `conflicts`: field -> its sentences, one a line."""
    found: dict[str, str] = {}
    for field, sentence in mistakes:
        found[field] = f"{found[field]}\n{sentence}" if field in found else sentence
    return found


def tokens_misfit(tokens: TokensForecast | None, target: TargetStated | None) -> str:
    """A text on why a target cannot read tokens; empty if it can, or if that is unknown."""
    if tokens is None or target is None:
        return ""
    if tokens.eos_token_ids is None or target.eos_token_ids is None:
        return ""
    size = 0 if tokens.vocab_size is None or tokens.is_bound else tokens.vocab_size
    return foreign_tokens(size, tokens.eos_token_ids, target.info["vocab_size"], target.eos_token_ids)


def length_misfit(tokens: TokensForecast | None, target: TargetStated | None, splits: Iterable[str]) -> str:
    """A text on samples of the splits that are longer than the target's positions, which a capture refuses; empty if
    there are none, or none is known yet.

    Stored samples are named. Before they exist max_length is refused only where it crosses a `rope_limit`.
    """
    return _beyond(tokens, target, splits) if target is not None and _refuses_longer(tokens, target) else ""


def length_note(tokens: TokensForecast | None, target: TargetStated | None, splits: Iterable[str]) -> str:
    """A warning of samples that may be longer than the target's positions, where `length_misfit` does not know it;
    empty without one.
    """
    if target is None or _refuses_longer(tokens, target):
        return ""
    found = _beyond(tokens, target, splits)
    if found and is_bounded(target.text):
        found += "; should there be a longer one, this node refuses it by name"
    return found and f"warning: {found}"


def _refuses_longer(tokens: TokensForecast | None, target: TargetStated) -> bool:
    """Whether a capture is known to refuse a sample of more tokens than the target's positions."""
    is_stored = tokens is None or tokens.folder is not None
    return is_bounded(target.text) and (is_stored or rope_limit(target.text) is not None)


def _beyond(tokens: TokensForecast | None, target: TargetStated, splits: Iterable[str]) -> str:
    """A text on samples of the splits with more tokens than the target's positions; empty if none is known."""
    limit = context_length(target.text)
    if tokens is None or limit is None or tokens.longest <= limit:
        return ""
    if tokens.folder is None:
        return f"samples of up to {too_long(tokens.longest, limit, target.text)}"
    chosen = set(splits)
    rows = (row for row in read_jsonl(tokens.folder / "samples.jsonl") if row["split"] in chosen)
    return long_samples(rows, target.text)


def pixels_misfit(target: TargetStated | None, min_pixels: int | None, max_pixels: int | None) -> dict[str, str]:
    """The conflict between a node's pixel limits and its target's image processor, by field; empty without
    a conflict.
    """
    try:
        place = "of the target"
        chosen_limits(place, place, {} if target is None else target.image_settings, min_pixels, max_pixels)
    except DataError as error:
        return {"max_pixels" if min_pixels is None else "min_pixels": str(error)}
    return {}


def are_different(one: str | None, other: str | None) -> bool:
    """Whether two identities belong to different artifacts; False where that is unknown."""
    if one is None or other is None or is_promised(one) != is_promised(other):
        return False
    return one != other


def of_another_target(draft: DraftForecast, target: TargetStated | None) -> str:
    """A text if a draft was trained for another target; empty if it fits or that is unknown."""
    own = identity_of(target)
    if target is None or own is None or draft.target is None or not are_different(draft.target, own):
        return ""
    if is_promised(own):
        return "this draft is trained for the target of another node"
    if is_same_target(draft.target, own, target.folder):
        return ""
    return f"this draft was trained for the target {draft.target[:12]}, but the node's target is {own[:12]}"


def template_digest(chat_template: str | None) -> str | None:
    """The SHA-256 of a file with a chat template; None where there is no such file."""
    if chat_template is None or not Path(chat_template).is_file():
        return None
    return hashlib.sha256(Path(chat_template).read_bytes()).hexdigest()


def processor_templates(processor: str | None) -> frozenset[str] | None:
    """The SHA-256 of the chat templates in a processor's directory; None where they are not known."""
    if processor is None or not Path(processor).is_dir() or processor_folder_mistakes(processor):
        return None
    return frozenset(
        hashlib.sha256(text.encode("utf-8", "replace")).hexdigest() for text in template_texts(Path(processor))
    )


def pinned_model(processor: str | None, revision: str | None) -> str | None:
    """A processor's model id with its commit, id@COMMIT; None for a directory and a built-in one."""
    if processor is None or is_builtin(processor) or Path(processor).exists():
        return None
    return f"{processor}@{revision}"


def is_promised(identity: str | None) -> bool:
    """Whether an identity stands for an artifact that does not exist yet."""
    return identity is not None and identity.startswith(PROMISED)


def identity_of(statement: Any) -> str | None:
    """The identity of the artifact that a forecast describes; None if nothing is known."""
    found: str | None = getattr(statement, "identity", None)
    return found


def refuse_conflicts(found: Mapping[str, str], inputs: Artifact | None = None) -> None:
    """Raise DataError with all conflicts of a stage, if there are any. inputs: an artifact to name first."""
    lines = [line for sentences in found.values() for line in sentences.splitlines()]
    if not lines:
        return
    place = "" if inputs is None else f"{inputs.path}: "
    raise DataError(place + (lines[0] if len(lines) == 1 else "\n" + "\n".join(f"  {line}" for line in lines)))


def first_counted(*forecast: TokensForecast | FeaturesForecast | None) -> TokensCounted | None:
    """The counted samples and tokens of the first forecast that has them; None if none has."""
    return next((one.counted for one in forecast if one is not None and one.counted is not None), None)


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json without any library. Raises DataError if it is missing or not a JSON object."""
    try:
        return read_object(path)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None


def read_target_config(directory: Path) -> dict[str, Any]:
    """The config.json of a target's checkpoint, with what it leaves to its class. Raises DataError as `read_config`."""
    return with_defaults(read_config(directory / "config.json"))


def amount(count: int | None) -> tuple[int, str]:
    """The number of tokens that a need is given for, and its unit: the data's tokens, or a million if unknown."""
    return (MILLION, "a million tokens") if count is None else (count, "")


def kept_samples(artifact: Path, source: Counts) -> Counts:
    """The samples kept in an artifact, and an estimate for the full run, with the same kept share of each kind."""
    kept: Counter[Kind] = Counter((row["category"], row["split"]) for row in read_jsonl(artifact / "samples.jsonl"))
    return Counts(kept, {kind: count * _share(kind, kept, source.trial) for kind, count in source.full.items()})


def counted_tokens(artifact: Path, samples: Counts) -> Counts:
    """The numbers of tokens in an artifact's samples, for trial and full run.

    Samples of the full run are assumed as long as the trial's of the same kind.
    """
    tokens: Counter[Kind] = Counter()
    for row in read_jsonl(artifact / "samples.jsonl"):
        tokens[row["category"], row["split"]] += row["tokens"]
    return Counts(tokens, {kind: count * _share(kind, tokens, samples.trial) for kind, count in samples.full.items()})


def _share(kind: Kind, part: Mapping[Kind, float], whole: Mapping[Kind, float]) -> float:
    """The ratio of `part` to `whole` for a kind; without data for its category, else for all."""
    alike = [{kind}, {other for other in whole if other[0] == kind[0]}, set(whole)]
    for kinds in alike:
        count = sum(whole.get(other, 0) for other in kinds)
        if count:
            return sum(part.get(other, 0) for other in kinds) / count
    return 0.0
