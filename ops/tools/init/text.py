"""The pipeline file for a user's data, with a comment beside every choice."""

from __future__ import annotations

import json
import textwrap

from dsl.check import FILL_IN
from dsl.errors import DataError, on_one_line
from dsl.shown import shown_bytes
from ops.ingest.image_values import OUTSIDE, REMOTE
from ops.lib.sglang.model_classes import not_run, served_class
from ops.lib.sglang.version import VERSIONS, installed_version
from ops.lib.vision.family_config import is_qwen
from ops.lib.vision.template_kinds import DAY
from ops.lib.vllm.serve_command import REFUSED, refusal
from ops.tools.init.advice import FLOAT32, Advice, Choice
from ops.tools.init.survey import QUESTION, REMEDIES, OwnRules, Survey, percentile
from ops.tools.init.target import LARGE, PAPER_LAYERS, Target
from ops.train_dflash.verdicts import LEAST_BETWEEN

WIDTH = 118
PLACEHOLDER = f"{FILL_IN} the directory of your target's checkpoint"
# Which engines have the algorithm, what its step costs, and whether its loss reads the target's distribution.
ALGORITHMS = {
    "dflash": "known to SGLang and vLLM, the cheapest step, no teacher",
    "dflash2": "known to SGLang; a dearer step (convolutions, a selector), no teacher",
    "dspark": "known to SGLang; a dearer step (the target's logits too), a teacher",
    "lilicorr": "known to SGLang; a dearer step (a transformer over candidates), a teacher",
}
ANSWERS_AGAIN = "later requests of a log have the earlier answers again, and each is learnt once"
WITHOUT_REASONING = "earlier answers came back without the reasoning that last ones have, so only these are learnt"
WHOLE = 'most conversations are in the log by their last request only, so all answers are learnt; "last": one of each'
SAID_BY_EXAMPLE = (OUTSIDE, REMOTE)
WITHOUT = "blocks through this target's cache do not give what single tokens give"
RECOMMENDED = "dflash"
TAUGHT = [name for name, what in ALGORITHMS.items() if what.endswith(", a teacher")]
OTHERS = [name for name in ALGORITHMS if name != RECOMMENDED]


def pipeline_text(
    name: str,
    sources: list[str],
    schema: str,
    found: Survey,
    target: Target | None,
    advice: Advice,
    is_verified: bool,
) -> str:
    """The text of a pipeline file, which compiles, except for the checkpoint if no target is given.

    sources, schema: how the file names the data and the JSON schema. is_verified: as in `Measured`. Raises DataError
    for a name that a pipeline file cannot contain.
    """
    sees = found.with_images > 0
    dtype = advice.precision.dtype
    nodes = [
        _ingest(sources, found, advice),
        _inject(found),
        _target(target),
        _regenerate(found, target, advice, dtype, sees),
        _tokenize(found, target, advice, sees),
        *([] if advice.online else [_capture(target, dtype, advice)]),
        _shard(advice),
        _train(target, dtype, advice, is_verified),
        _export(dtype),
        *(_evaluation(advice, dtype) if is_verified else [[f"# no [node.eval], no [node.check]: {WITHOUT}"]]),
    ]
    head = [f"#:schema {schema}", *summary(found, target, advice, comment=True), "", "[pipeline]"]
    head += [
        f"{f'name = {json.dumps(name, ensure_ascii=False)}':33} # also the name of MLflow's experiment",
        "seed = 0",
    ]
    return "\n\n".join(["\n".join(head), *("\n".join(lines) for lines in nodes)]) + "\n"


def summary(found: Survey, target: Target | None, advice: Advice, *, comment: bool = False) -> list[str]:
    """Lines on the survey and the choices that follow from it, for the screen or as comments."""
    mark = "# " if comment else ""
    lines = [
        *_about_data(found),
        *_about_requests(found),
        *_about_lengths(found, advice),
        *_about_reasoning(found, target),
        *_about_tools(found),
        f"splits: {advice.held_out}",
    ]
    kind = "captured while training, not stored" if advice.online else "stored"
    lines.append(f"features: {kind}; {advice.capture_why}")
    if advice.precision.why:
        lines.append(f"dtype: {advice.precision.dtype}; {advice.precision.why}")
    lines.append(f"algorithm: {RECOMMENDED}, {ALGORITHMS[RECOMMENDED]}; {' and '.join(OTHERS)}: see [node.train]")
    lines += [] if target is None else about_serving(target)
    lines += [f"warning: {warning}" for warning in advice.warnings]
    lines += [f"note: {note}" for note in advice.notes]
    folded = [textwrap.wrap(on_one_line(line), WIDTH - len(mark), subsequent_indent="    ") for line in lines]
    return [f"{mark}{part}" for parts in folded for part in parts]


def about_serving(target: Target) -> list[str]:
    """Lines on whether the installed SGLang serves the target, and on a vLLM that does not; without SGLang none for
    Qwen's, which are tested.
    """
    kind = str(target.config.get("model_type"))
    of_vllm = [f"target: {refusal(kind)} (docs/targets.md)"] if kind in REFUSED else []
    found = served_class(target.config)
    if found is not None:
        said = found.sentence if found.way == "none" else not_run(target.config) or found.sentence
        return [f"target: {said}", *of_vllm]
    if is_qwen(target.config):
        return []
    said = "whether SGLang serves it is read from the installed one, and none is here (docs/targets.md)"
    return [f"target: {said}", *of_vllm]


def _about_data(found: Survey) -> list[str]:
    texts = found.samples - found.with_images
    samples = f"{_samples(found.usable)} ({', '.join(dict.fromkeys(found.forms))})"
    lines = [f"data: {samples}, {found.usable - texts:,} with images, {texts:,} text only"]
    if found.with_tools or found.with_calls:
        counts = (found.with_tools, found.with_calls)
        tools, calls = (f"{count:,} ({100 * count / found.samples:.0f} %)" for count in counts)
        lines.append(f"tools: {tools} of {_samples(found.samples)} with tools, {calls} with calls of them")
    if found.proposal is not None:
        lines.append(f"columns: {found.proposal.why}")
    for reason, count in found.dropped.most_common():
        remedy = f"; {REMEDIES[reason]}" if reason in REMEDIES and reason not in SAID_BY_EXAMPLE else ""
        lines.append(f"dropped: {count:,} ({reason}), such as {found.examples[reason]}{remedy}")
    lines += [f"images: {each}" for each in found.unnamed]
    if found.decoded:
        good = found.decoded - found.broken
        lines.append(f"images: {good} of {found.decoded} examined can be decoded{_sizes(found)}")
    if found.unseen_spoilt:
        lines.append(
            f"images: of the samples that were not examined {found.unseen_spoilt:,} do not count either, the same share"
        )
    return lines


def _samples(number: int) -> str:
    return f"{number:,} sample{'s' * (number != 1)}"


def _sizes(found: Survey) -> str:
    sizes = sorted((size for length in found.lengths for size in length.images), key=lambda size: size[0] * size[1])
    if not sizes:
        return ""
    small, large = sizes[0], sizes[-1]
    return f", {small[0]} x {small[1]} to {large[0]} x {large[1]} pixels"


def _about_lengths(found: Survey, advice: Advice) -> list[str]:
    rules = advice.rules
    samples = [tokens for length in found.lengths for tokens in length.of_parts(length.samples, rules)]
    prompts = [length.prompt(rules) for length in found.lengths]
    answers = [tokens for length in found.lengths for tokens in length.answers]
    how = "by the target's tokenizer" if found.exact else "estimated at 4 bytes a token"
    if found.rendered:
        how = "as the target's chat template and tokenizer make them"
    pictures = ""
    if found.with_images and isinstance(found.rules, OwnRules):
        pictures = f"; images are estimated, each as one of {' x '.join(f'{side:,}' for side in LARGE)} pixels"
    elif found.with_images and found.exact:
        pictures = ", images as they are resized for it"
    of = _samples(len(found.lengths))
    if len(samples) > len(found.lengths):
        of = f"{len(samples):,} samples that {len(found.lengths):,} conversations make"
    lines = [f"tokens of a {'sample' if answers else 'prompt'}: {_spread(samples)} ({how}{pictures}; of {of})"]
    if answers:
        lines += [f"tokens of a prompt: {_spread(prompts)}", f"tokens of an answer: {_spread(answers)}"]
    if found.longest:
        most = max(length.prompt(rules) for length in found.longest)
        lines.append(
            f"tokens of a prompt: up to {most:,} of the {_samples(len(found.longest))} with the most text of all, "
            "which count for limits only"
        )
    if found.unfit:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in found.unfit.most_common())
        example = found.examples[found.unfit.most_common(1)[0][0]]
        lines.append(
            f'chat template: it does not fit {_samples(found.unfit.total())} of those examined, which answers = "data" '
            f"drops: {reasons}, such as {example}"
        )
    if found.unrendered:
        lines.append(f"chat template: not used to count tokens, so that what it adds is estimated: {found.unrendered}")
    if unanswered := found.unanswered - found.asked_again:
        lines.append(
            f"answers: {_samples(unanswered)} end{'s' * (unanswered == 1)} with the user's turn; "
            "the target answers them"
        )
    if found.has_classes:
        lines.append("answers: the names of classes do not count; the target answers")
    length = "as long as the data's" if answers else "half as long as max_new_tokens"
    lines.append(f"tokens in total: about {advice.tokens:,}, if the target's answers are {length}")
    return lines


def _spread(values: list[int]) -> str:
    return f"median {percentile(values, 0.5):,}, 95 % {percentile(values, 0.95):,}, longest {max(values):,}"


def _about_requests(found: Survey) -> list[str]:
    """A line on which answers of a log are learnt; none for a log without earlier answers."""
    if not found.continued:
        return []
    about = (
        f"requests: {found.continued:,} of {found.requests:,} have earlier answers, and of {found.preceded:,} of them "
        "the log has the request before"
    )
    chosen = f'so learnt_in_requests = "last": {_why_last(found)}' if found.learns_last else WHOLE
    return [f"{about}; {chosen}"]


def _why_last(found: Survey) -> str:
    return WITHOUT_REASONING if found.lost_reasoning else ANSWERS_AGAIN


def _ingest(sources: list[str], found: Survey, advice: Advice) -> list[str]:
    lines = ["[node.ingest]", 'op = "ingest"', f"source = {_quoted_all(sources)}"]
    if found.proposal is not None:
        given = ", ".join(f"{key} = {_quoted(column)}" for key, column in found.proposal.columns.given.items())
        lines += [f"# columns: {on_one_line(found.proposal.why)}", f"columns = {{ {given} }}"]
        if "answer" in found.proposal.columns.given and "question" not in found.proposal.columns.given:
            lines.append(f'question = "{QUESTION}"    # what is asked of every answer')
    if found.has_classes:
        lines.append(
            f'question = "{QUESTION}"    # what is asked about every image; {{label}} is the name of its class'
        )
    if found.unanswered:
        lines.append("require_answers = false           # prompts suffice: regenerate answers them")
    if found.learns_last:
        lines.append(_noted('learnt_in_requests = "last"', _why_last(found)))
    elif found.continued:
        lines.append(_noted('# learnt_in_requests = "last"', WHOLE))
    if found.duplicates:
        lines.append(f'duplicate_ids = "number"          # {found.duplicates:,} ids have more than one sample')
    if found.image_root is not None:
        roots = found.image_root if isinstance(found.image_root, tuple) else (found.image_root,)
        lines.append(f"image_root = {_quoted_all(list(roots))}")
    if found.allow_outside:
        lines.append("allow_outside = true")
    elif found.dropped[OUTSIDE]:
        lines.append(f"# allow_outside = true            # {found.dropped[OUTSIDE]:,} images lie outside the folder")
    val, test = advice.fractions
    drawn_by = "conversation" if found.requests == found.samples else "id"
    if 0 < found.requests < found.samples:
        drawn_by = "id, of requests of the conversation"
    given = f", those of {', '.join(sorted(found.given))} by the data itself" if found.given else ""
    return [
        *lines,
        f"val_fraction = {val}",
        f"{f'test_fraction = {test}':33} # {advice.held_out}, drawn by hash of the {drawn_by}{given}",
    ]


def _inject(found: Survey) -> list[str]:
    if not found.with_images:
        return ["[node.inject]                     # texts pass through", 'op = "inject_images"', 'samples = "@ingest"']
    lines = ["[node.inject]", 'op = "inject_images"', 'samples = "@ingest"']
    if found.placed_images:
        of = f"{_samples(found.placed_images)} with several images, or with one in a tool's result"
        lines.append(f'image_policy = "in-place"         # {of}')
    return lines


def _target(target: Target | None) -> list[str]:
    lines = ["[node.target]", 'op = "load_target"']
    if target is None:
        return [*lines, f'checkpoint = "{PLACEHOLDER}"    # then run `dflow plan` again']
    lines.append(f"checkpoint = {_quoted(target.checkpoint)}")
    if target.revision is not None:
        lines.append(f"revision = {_quoted(target.revision)}")
    if target.mask is not None:
        number, why = target.mask
        lines.append(
            _line(
                "mask_token_id",
                Choice(number, f"none is known for this model: {why}"),
            )
        )
    if target.dated:
        why = "the day that its chat template writes, here and in serving, unless this line names another"
        lines.append(_noted(f'# template_date = "{DAY}"', why))
    return lines


def _regenerate(found: Survey, target: Target | None, advice: Advice, dtype: str, sees: bool) -> list[str]:
    answered = found.samples > found.unanswered and not found.has_classes
    lines = [
        "[node.regenerate]                 # a draft learns from the target's own answers: see docs/data.md",
        'op = "regenerate_answers"',
        'samples = "@inject"',
        'target = "@target"',
        *(
            ['# answers = "data"                # train on the data\'s answers: nothing is generated']
            if answered
            else []
        ),
        'splits = ["train", "val", "test"]',
        _line("max_prompt_tokens", advice.max_prompt_tokens),
        _line("max_new_tokens", advice.max_new_tokens),
        _noted("drop_repetitions = true", "answers that end in a loop"),
    ]
    lines += [*_thinking(found, target), *_tools(found)]
    return [*lines, *_reasoned_dtype(advice), *_pixels(advice, target, sees)]


def _tokenize(found: Survey, target: Target | None, advice: Advice, sees: bool) -> list[str]:
    return [
        "[node.tokenize]",
        'op = "tokenize_chat"',
        'samples = "@regenerate"',
        'target = "@target"                # its tokenizer, chat template and image processor',
        _noted('contexts = "served"', "each answer follows the prompt that a server renders"),
        _line("max_length", Choice(advice.max_length, "max_prompt_tokens + max_new_tokens; longer ones are dropped")),
        _line("min_loss_tokens", advice.min_loss_tokens),
        _line("expected_tokens", Choice(advice.tokens, _about_tokens(found))),
        *_thinking(found, target),
        *_tools(found),
        *_pixels(advice, target, sees),
    ]


def _about_tokens(found: Survey) -> str:
    """What is said of expected_tokens, which counts a conversation as one sample."""
    counted = "for dflow plan, until they are counted"
    if found.rendered or all(len(length.answers) < 2 for length in found.lengths):
        return counted
    return f"{counted}; each conversation counts once: more if the chat template changes its history"


def _capture(target: Target | None, dtype: str, advice: Advice) -> list[str]:
    return [
        f"[node.capture]                    # {shown_bytes(advice.features)} of features in the store",
        'op = "capture_targets"',
        'tokens = "@tokenize"',
        'target = "@target"',
        _layers("num_layers", target),
        *_dtype("dtype", dtype),
        f"{'# final_hidden = true':33} # the teacher of {', '.join(TAUGHT)}: one layer's features more ([node.train])",
        '# backend = "sglang"              # the engine that serves, if it is installed: docs/sglang.md',
    ]


def _layers(field: str, target: Target | None) -> str:
    """The line with the layers to capture. field: that of their number."""
    if target is not None and target.layer_ids is not None:
        return _noted(f"target_layer_ids = {list(target.layer_ids)}", "all but the last of the target's layers")
    return f"{field} = {PAPER_LAYERS if target is None else target.num_layers}"


def _shard(advice: Advice) -> list[str]:
    source = 'tokens = "@tokenize"' if advice.online else 'features = "@capture"'
    return [
        "[node.shard]",
        'op = "shard_sequence"',
        source,
        _line("tokens_per_step", advice.tokens_per_step),
        _line("epochs", advice.epochs),
    ]


def _train(target: Target | None, dtype: str, advice: Advice, is_verified: bool) -> list[str]:
    lines = ["[node.train]", 'op = "train_dflash"']
    if advice.online:
        lines += [
            'capture = "online"                # the features would not fit on the disk',
            _layers("capture_layers", target),
            *_dtype("capture_dtype", dtype),
        ]
    else:
        lines.append('features = "@capture"')
    return [
        *lines,
        'tokens = "@tokenize"',
        'batches = "@shard"',
        'target = "@target"',
        *_algorithm(advice),
        _line("block_size", advice.block_size),
        *_dtype("dtype", "bfloat16" if dtype != FLOAT32 else dtype),
        f"micro_batch_tokens = {min(advice.tokens_per_step.value, 16_384)}",
        *_measuring(advice, is_verified),
    ]


def _algorithm(advice: Advice) -> list[str]:
    """Lines that set the recommended algorithm, and tell how to choose another."""
    teacher = "captured with the features" if advice.online else "final_hidden = true in [node.capture]"
    others = [
        _noted(f'# algorithm = "{name}"', f"{ALGORITHMS[name]}{f': {teacher}' if name in TAUGHT else ''}")
        for name in OTHERS
    ]
    return [_noted(f'algorithm = "{RECOMMENDED}"', f"{ALGORITHMS[RECOMMENDED]}; docs/drafts.md compares"), *others]


def _measuring(advice: Advice, is_verified: bool) -> list[str]:
    saving = _line("checkpoint_every", advice.checkpoint_every)
    if advice.measure_every is None:
        lengths = f"omitted: of about {advice.steps:,} steps only the last is worth measuring"
        return [saving, f"{f'# eval_every = {LEAST_BETWEEN}':33} # {lengths}"]
    loss_only = [] if is_verified else [f"{'eval_prompts = 0':33} # val is measured by its loss only: {WITHOUT}"]
    return [saving, _line("eval_every", advice.measure_every), *loss_only]


def _export(dtype: str) -> list[str]:
    return ["[node.export]", 'op = "export_draft"', 'draft = "@train"', 'target = "@target"', *_dtype("dtype", dtype)]


def _evaluation(advice: Advice, dtype: str) -> list[list[str]]:
    tie = [] if dtype == FLOAT32 else ["tie_margin = 0.5                  # bfloat16 rounds logits near 20 to 0.125"]
    evaluate = [
        "[node.eval]                       # tau, and that every answer is still the target's own",
        'op = "evaluate"',
        'draft = "@export"',
        'target = "@target"',
        'tokens = "@tokenize"',
        f"max_new_tokens = {min(advice.max_new_tokens.value, 512)}",
        *_dtype("dtype", dtype),
        *tie,
    ]
    check = [
        "[node.check]                      # the serving contract; in SGLang too, where it is installed",
        'op = "check_export"',
        'draft = "@export"',
        'target = "@target"',
        'tokens = "@tokenize"',
        'report = "@eval"',
    ]
    return [evaluate, check]


def _quoted_all(texts: list[str]) -> str:
    """A single text quoted, or several as a TOML list."""
    return _quoted(texts[0]) if len(texts) == 1 else f"[{', '.join(map(_quoted, texts))}]"


def _quoted(text: str) -> str:
    """A text as a quoted TOML value, with ${ escaped, as it would begin a reference.

    Raises DataError for text that is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{on_one_line(text)}: a pipeline file is UTF-8, and this name is not: rename it") from error
    return json.dumps(text.replace("${", "$${"), ensure_ascii=False).replace("\x7f", "\\u007f")


def _line(field: str, choice: Choice) -> str:
    value = choice.value if choice.value < 10_000 else f"{choice.value:_}"
    return _noted(f"{field} = {value}", choice.why)


def _noted(line: str, note: str) -> str:
    return f"{line:33} # {note}"


def _reasoned_dtype(advice: Advice) -> list[str]:
    """The line that sets the dtype of the first node that has one, with the reason beside it; empty for float32."""
    dtype, why = advice.precision.dtype, advice.precision.why
    return [_noted(f'dtype = "{dtype}"', why)] if why else _dtype("dtype", dtype)


def _dtype(field: str, dtype: str) -> list[str]:
    """The line that sets a field to a dtype; none for float32, the default."""
    return [] if dtype == FLOAT32 else [f'{field} = "{dtype}"']


def enable_thinking(found: Survey, target: Target | None) -> bool | None:
    """The value of enable_thinking: whether half of the learnt answers, or more, have reasoning; None if the target
    cannot think.
    """
    if target is None or not target.thinks:
        return None
    return found.answers.reasoned > 0 and found.answers.learnt <= 2 * found.answers.reasoned


def _thinking(found: Survey, target: Target | None) -> list[str]:
    """The lines that set enable_thinking; none if the target cannot think."""
    chosen = enable_thinking(found, target)
    if chosen is None:
        return []
    why = f"a guess, {_with_reasoning(found)} have reasoning: as your server runs it, the same in both nodes"
    if not found.answers.reasoned:
        why = "no answer of the data has reasoning; true for others, in both nodes"
    return [_noted(f"enable_thinking = {json.dumps(chosen)}", why)]


def _with_reasoning(found: Survey) -> str:
    return f"{found.answers.reasoned:,} of {found.answers.learnt:,} learnt answers"


def _about_reasoning(found: Survey, target: Target | None) -> list[str]:
    if not found.answers.reasoned:
        return []
    about = f"reasoning: {_with_reasoning(found)} have some"
    if target is None:
        return [f"{about}; set enable_thinking in regenerate and tokenize if the target's chat template reads it"]
    if not target.thinks:
        return [f"{about}; the target's chat template does not read enable_thinking, which shows or hides it"]
    chosen, answers = json.dumps(enable_thinking(found, target)), found.answers
    return [
        f"{about}; does your server think? enable_thinking = {chosen} is a guess by that share, in "
        f'regenerate and tokenize. It matters with answers = "data": false drops the {_samples(answers.thinking)} with '
        f"reasoning; with true, the {_samples(answers.plain)} with an answer without any learn an empty thought, or "
        "are dropped, as the chat template begins answers"
    ]


def _tools(found: Survey) -> list[str]:
    """The line that sets the form of tools to that of the installed SGLang, a comment if none is known; none without
    tools.
    """
    if not found.with_tools:
        return []
    engine = tools_as(found)
    if engine is None:
        newest = f'# tools_as = "sglang-{VERSIONS[-1]}"'
        return [_noted(newest, "the engine that will serve, which shows tools in its own form; the same in both nodes")]
    return [_noted(f'tools_as = "{engine}"', "as the installed engine shows tools; the same in both nodes")]


def _about_tools(found: Survey) -> list[str]:
    if not found.with_tools:
        return []
    engine = tools_as(found)
    about = "tools: each engine shows them in a form of its own"
    if engine:
        return [f'{about}, so tools_as = "{engine}"']
    return [f"{about}: take in tools_as in regenerate and tokenize, for the engine that will serve"]


def tools_as(found: Survey) -> str | None:
    """The value of tools_as: the installed SGLang, where the data has tools; None without a supported one."""
    version = installed_version()
    return f"sglang-{version}" if found.with_tools and version in VERSIONS else None


def _pixels(advice: Advice, target: Target | None, sees: bool) -> list[str]:
    lines = [_line("max_pixels", advice.max_pixels)] if sees and advice.max_pixels is not None else []
    if sees and target is not None and target.image_backend != "pillow":
        lines.append(f'image_backend = "{target.image_backend}"     # the only library of its image processor')
    return lines
