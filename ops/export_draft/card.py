"""The model card of a draft: README.md of its serving directory. The same draft gives the same card.

The accepted lengths, known only after the evaluation, are between two marks; `with_measured` fills that place.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from attrs import Factory, frozen

from ops.lib.data.reasoning_keys import engines_without
from ops.lib.drafts.algorithms import NO_SERVER, Algorithm, name_and_fields, plain
from ops.lib.drafts.backbone.config import SCALES, DraftConfig, to_serving
from ops.lib.drafts.backbone.contract import SGLANG, embedding_warnings, range_warnings
from ops.lib.drafts.backbone.serving_contract import SPECULATORS
from ops.lib.sglang.serve_command import DraftOption, Served, launch_command, shell_line
from ops.lib.sglang.version import either
from ops.lib.vision.family_config import is_qwen
from ops.lib.vllm.serve_command import environment as vllm_environment
from ops.lib.vllm.serve_command import launch_command as vllm_command
from ops.lib.vllm.serve_command import warnings_for_vllm
from ops.lib.vllm.version import VLLM_VERSION

BEGIN, END = "<!-- accepted length -->", "<!-- end of accepted length -->"
LAST_TAG, SERVED_TAG = "- draft-model\n", "- sglang\n"
# Which engine serves a target is read from the installed one, by the gate, whose key has that engine's version.
UNREAD = "Whether SGLang serves a draft for this target was not checked."
TOLD_BY_GATE = (
    "Whether SGLang serves a draft for this target, `check_export` reads from the installed version: see the section "
    "on accepted lengths. If it does"
)
TOLD_BY_VLLM = "Whether vLLM serves a draft for this target, it reports when it starts. If it does"
TARGET_PLACE = "$TARGET"
NOT_SHOWN = frozenset({"seed", "warm_start"})  # of the training's fields; both are in MLflow


@frozen(kw_only=True)
class CardFacts:
    """The facts for a model card. target: target.json. training: training.json. Both digests are the store's.

    dtype: of the draft's weights. served: as `dflow serve` starts the target. formats: those of the export. training
    and its digest are None for a draft that was trained elsewhere, with `imported` of its config.json in their place.
    target_config: the target's config.json.
    """

    draft: DraftConfig
    dtype: str
    parameters: int
    target: Mapping[str, Any]
    target_digest: str
    served: Served
    formats: tuple[str, ...] = (SGLANG,)
    training: Mapping[str, Any] | None = None
    training_digest: str | None = None
    imported: Mapping[str, Any] | None = None
    target_config: Mapping[str, Any] = Factory(dict)

    @property
    def target_name(self) -> str:
        """The target's model id, or the family of a checkpoint without one."""
        kind = str(self.target["model_type"])
        return self.target.get("model_id") or f"{'an' if kind.startswith(tuple('aeiou')) else 'a'} {kind} checkpoint"


def model_card(facts: CardFacts) -> str:
    """The text of the model card README.md, with front matter for Hugging Face."""
    parts = [
        _front_matter(facts),
        f"# Draft for {facts.target_name} ({facts.draft.algorithm.name})",
        f"A draft model for speculative decoding by block diffusion ({_sources(facts.draft.algorithm)}): it "
        f"proposes {facts.draft.block_size - 1} tokens at once, and the target verifies them in one forward pass. At "
        "temperature 0 the answers are the target's own. It has neither an embedding nor a head, because it uses the "
        "target's, so it works only with this target.",
        _target(facts),
        _serving(facts),
        with_place("Not measured yet." + ("" if is_qwen(facts.target) else f" {UNREAD}")),
        _draft(facts),
    ]
    if facts.imported is not None:
        parts.append(_origin(facts.imported))
    if facts.training is not None:
        parts += [_data(facts.training), _recipe(facts.training), _tracking(facts.training_digest)]
    return "\n\n".join(parts) + "\n"


def with_place(text: str) -> str:
    """The model card's section on accepted lengths, between marks by which it is found again."""
    return f"{BEGIN}\n\n## Accepted length\n\n{text}\n\n{END}"


def with_measured(card: str, text: str) -> str:
    """The model card with `text` as its section on accepted lengths; appended if the card has no such section."""
    before, begin, rest = card.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        return f"{card.rstrip()}\n\n{with_place(text)}\n"
    return before + with_place(text) + after


def with_served_tag(card: str) -> str:
    """The model card with the tag of SGLang in its front matter."""
    return card if SERVED_TAG in card else card.replace(LAST_TAG, f"{LAST_TAG}{SERVED_TAG}", 1)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _sources(algorithm: Algorithm) -> str:
    """Links to the papers of DFlash, and of the algorithm that extends it."""
    own = f"[{algorithm.name}]({algorithm.source})" if algorithm.source else algorithm.name
    dflash = plain()
    return f"[DFlash]({dflash.source})" + ("" if algorithm.name == dflash.name else f", extended by {own}")


def _front_matter(facts: CardFacts) -> str:
    tags = [facts.draft.algorithm.name, "speculative-decoding", "block-diffusion", "draft-model"]
    tags += ["sglang"] if facts.draft.algorithm.engine and is_qwen(facts.target) else []  # of others the gate knows it
    if SPECULATORS in facts.formats:
        tags += ["vllm", "speculators"]
    lines = ["library_name: transformers"]
    lines.append(f"pipeline_tag: {'image-text-to-text' if facts.target['vision'] else 'text-generation'}")
    if facts.target.get("model_id"):
        lines.append(f"base_model: {facts.target['model_id']}")
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _target(facts: CardFacts) -> str:
    target = facts.target
    named = [("model id", target["model_id"]), ("revision", target["revision"])] if target.get("model_id") else []
    rows = [
        *named,
        ("model_type", target["model_type"]),
        ("takes images", "yes" if target["vision"] else "no"),
        ("vocabulary, hidden size, layers", f"{target['vocab_size']}, {target['hidden_size']}, {target['num_layers']}"),
        ("digest", f"`{facts.target_digest}`"),
    ]
    return "## Target\n\n" + table(("", ""), rows)


def _serving(facts: CardFacts) -> str:
    """The commands to serve this directory; a target without a model id is a shell variable."""
    served = facts.served
    if not facts.draft.algorithm.engine:
        return f"## Serving\n\n{NO_SERVER[0].upper()}{NO_SERVER[1:]}: dflow alone decodes with it (`evaluate`)."
    model_id, revision = facts.target.get("model_id"), facts.target.get("revision")
    target = model_id or TARGET_PLACE
    extra = ("--revision", revision) if model_id and revision else ()
    command = launch_command(target, served, _draft_option(facts, "."), extra=extra)
    in_sglang = f"ith SGLang {either(served.versions)}, in this directory:"
    text = [
        "## Serving\n\n" + (f"W{in_sglang}" if is_qwen(facts.target) else f"{TOLD_BY_GATE}, w{in_sglang}"),
        _shell(shell_line(command, served.environment), model_id),
    ]
    if SPECULATORS in facts.formats:
        command = vllm_command(target, served, _draft_option(facts, f"./{SPECULATORS}"), extra=extra)
        in_vllm = (
            f"ith vLLM {VLLM_VERSION}, in this directory (`{SPECULATORS}/` holds the same draft in the format of "
            "speculators, and can be used without the rest):"
        )
        text.append(f"W{in_vllm}" if is_qwen(facts.target) else f"{TOLD_BY_VLLM}, w{in_vllm}")
        text.append(_shell(shell_line(command, vllm_environment(served)), model_id))
        text += [f"{warning[0].upper()}{warning[1:]}." for warning in warnings_for_vllm(served)]
    if not model_id:
        text.append(
            f"TARGET is a copy of the target's checkpoint: `objects/{facts.target_digest}/model` in the store of the "
            "training. `dflow serve RUN` prints the command with all paths, and runs it."
        )
    if served.unfit_versions:
        text.append(
            "The launcher is dflow's: it starts SGLang's own server and gives this target the one method that DFLASH "
            f"needs and that SGLang {either(served.unfit_versions)} lacks for it."
        )
    if served.captured_flags:
        text.append(
            "The features of the training were captured by SGLang with "
            f"`{shell_line(served.captured_flags, {})}`; without that the target computes something else."
        )
    of_range = range_warnings(facts.target_config)
    shown = ("SGLang", "vLLM") if SPECULATORS in facts.formats else ("SGLang",)
    text += [f"With {engine}: {of_range[engine]}." for engine in shown if engine in of_range]
    if facts.target["vision"] and facts.imported is None:
        engines = "Both engines use" if SPECULATORS in facts.formats else "SGLang uses"
        text.append(
            f"The images of the training were prepared with {served.image_backend}. {engines} torchvision by "
            "default, and the two differ when an image is resized, so the command names that of the training."
        )
    captured = facts.training["captured"] if facts.training is not None else {}
    text += [
        f"{warning[0].upper()}{warning[1:]}." for warning in prompt_warnings(captured, served.versions, facts.formats)
    ]
    if served.pixels:
        text.append(
            "Its images were limited to other sizes than the target's own, which the command names too: without them "
            "an image has another number of tokens than in the training."
        )
    return "\n\n".join(text)


def prompt_warnings(tokens: Mapping[str, Any], versions: Iterable[str], formats: Collection[str]) -> list[str]:
    """Warnings of engines whose servers give the chat template something else than the training did: tools in another
    form, unless it used that of one of them, or no reasoning of earlier answers.

    tokens: tokens.json of the training, or what its features keep of that. versions: those of SGLang that may serve.
    formats: those of the export.
    """
    engines = [f"sglang-{version}" for version in versions]
    engines += [f"vllm-{VLLM_VERSION}"] if SPECULATORS in formats else []
    warnings = []
    unlike = {name: words for name, words in tokens.get("tools_unlike", {}).items() if name in engines}
    if unlike and tokens.get("tools_as") not in engines:
        named = "; ".join(f"{name} {', '.join(words)}" for name, words in unlike.items())
        warnings.append(
            f"the chat template gets tools in another form from these engines than in the training ({named}): set "
            "tools_as of tokenize_chat and regenerate_answers to the one that serves"
        )
    key = tokens.get("reasoning_key")
    if key is not None and (without := engines_without(key, engines)):
        warnings.append(
            f'the chat template shows the reasoning of earlier answers from "{key}", which these engines do not give '
            f"it ({', '.join(without)}): their prompts lack what the training had; set "
            'history_reasoning = "dropped" of tokenize_chat and regenerate_answers'
        )
    return warnings


def _draft_option(facts: CardFacts, path: str) -> DraftOption:
    draft = facts.draft
    return DraftOption(path=path, block_size=draft.block_size, algorithm=draft.algorithm.engine)


def _shell(line: str, model_id: str | None) -> str:
    """A Markdown block with a shell command; a target without a model id is a shell variable."""
    lines = [line.replace(f"'{TARGET_PLACE}'", f'"{TARGET_PLACE}"')]
    if not model_id:
        lines.insert(0, "TARGET=/path/to/target")
    return "```sh\n" + "\n".join(lines) + "\n```"


def _draft(facts: CardFacts) -> str:
    draft = facts.draft
    rows = [
        *((name, _plain(value)) for name, value in name_and_fields(draft.algorithm).items()),
        ("block_size", draft.block_size),
        ("layers", f"{draft.num_hidden_layers}: {', '.join(sorted(set(draft.layer_types)))}"),
        ("sliding_window", draft.sliding_window if draft.slides else "-"),
        ("target_layer_ids", ", ".join(map(str, draft.target_layer_ids))),
        ("mask_token_id", draft.mask_token_id),
        ("positions", f"{draft.positions}, 1-D"),
        ("parameters", facts.parameters),
        ("dtype of the weights", facts.dtype),
    ]
    rows += [(name, _plain(getattr(draft, name))) for name, usual in SCALES.items() if getattr(draft, name) != usual]
    rotary = rotary_warning(draft.partial_rotary_factor)
    of_embedding = embedding_warnings(to_serving(draft), facts.target_config) if draft.algorithm.engine else {}
    warnings = [*((rotary,) if rotary else ()), *of_embedding.values()]
    return "## Draft\n\n" + table(("", ""), rows) + "".join(f"\n\n{text[0].upper()}{text[1:]}." for text in warnings)


def rotary_warning(partial_rotary_factor: float) -> str | None:
    """A warning about a draft that rotates only a part of each head; None for one that rotates all."""
    if partial_rotary_factor == 1:
        return None
    return (
        f"partial_rotary_factor is {partial_rotary_factor:g}: SGLang and vLLM rotate this share of each head, as the "
        "training did, but the reference class and speculators' converter silently rotate whole heads, so that fewer "
        "tokens are accepted"
    )


def _origin(imported: Mapping[str, Any]) -> str:
    """Lines on a draft that was trained elsewhere: its publisher, and what its files omit."""
    named = {name: imported[name] for name in ("source", "revision") if name in imported}
    parts = [
        "## Origin\n\nTrained elsewhere, and imported by `load_draft` of dflow.",
        table(("", ""), {"written by": imported["publisher"], **named}.items()),
    ]
    if imported["assumed"]:
        rows = [(name, json.dumps(value)) for name, value in sorted(imported["assumed"].items())]
        parts.append("Its config.json leaves these open; they are the defaults of its class, or the target's:")
        parts.append(table(("field", "assumed"), rows))
    if imported["notes"]:
        parts.append("\n".join(f"- {note}" for note in imported["notes"]))
    return "\n\n".join(parts)


def _data(training: Mapping[str, Any]) -> str:
    captured = training["captured"]
    rows = [
        ("samples of the train split", training["samples"]),
        ("tokens trained on, over all epochs", training["tokens"]),
        ("anchors", training["anchors"]),
        ("digest of the tokens", f"`{captured['tokens']}`"),
    ]
    if "features" in training:
        rows.append(("digest of the features", f"`{training['features']}`"))
    stored_as = f", as {captured['feature_dtype']}" if "feature_dtype" in captured else ""
    rows.append(("features by", f"{captured['backend']}, {captured['dtype']}{stored_as}"))
    return "## Data\n\n" + table(("", ""), rows)


def _recipe(training: Mapping[str, Any]) -> str:
    loss = f"mean loss of the last {training['final_steps']} steps"
    measured = {"steps": training["steps"], loss: f"{training['final_loss']:.4g}"}
    for name, value in sorted((training["val_metrics"] or {}).items()):
        if name in ("val/loss", "val/accuracy", "val/expected_tau"):
            measured[name] = f"{value:.4g}"
    fields = {name: value for name, value in sorted(training["recipe"].items()) if name not in NOT_SHOWN}
    shown = {name: _plain(value) for name, value in fields.items() if value not in (None, [], {})}
    return (
        "## Recipe\n\n`train_dflash` of dflow, with\n\n"
        + table(("field", "value"), shown.items())
        + "\n\nwhich ended at\n\n"
        + table(("", ""), measured.items())
        + "\n\n`val/expected_tau` is the accepted length if slots were right independently of each other."
    )


def _tracking(digest: str | None) -> str:
    return (
        "## Origin\n\nThe training is the MLflow run that this filter finds; its parent is the run of the "
        f"whole pipeline.\n\n```\ntags.`dflow.digest` = '{digest}'\n```"
    )


def _plain(value: object) -> str:
    """A value as text in a pipeline file's style, without quotes and brackets."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {_plain(each)}" for name, each in value.items() if each is not None)
    return ", ".join(map(_plain, value)) if isinstance(value, list) else str(value)
