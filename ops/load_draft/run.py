"""Read a draft that was trained elsewhere, and write it as `export_draft` writes one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from dsl.errors import ConfigError, DataError
from dsl.files import replace_file
from dsl.stage import Stage
from ops.export_draft.card import CardFacts, model_card
from ops.lib.data.files import write_json
from ops.lib.drafts.backbone.config import to_serving
from ops.lib.drafts.backbone.contract import refuse, training_record
from ops.lib.drafts.backbone.load import CONFIG, WEIGHTS, tensors_digest
from ops.lib.drafts.backbone.load import read_config as read_draft_json
from ops.lib.drafts.backbone.serving_contract import CARD, ServedTarget, check_serving, tensors_digest_mistakes
from ops.lib.sglang.serve_command import Served
from ops.lib.target.checkpoint_check import draft_folder_mistakes
from ops.lib.target.checkpoint_files import CONFIGS
from ops.lib.target.checkpoint_files import WEIGHTS as WEIGHT_FILES
from ops.lib.target.fetch import fetch
from ops.lib.target.model import read_config, target_info
from ops.lib.target.same_target import is_same_target
from ops.load_draft.headers import FORBIDDEN
from ops.load_draft.op import LoadDraft
from ops.load_draft.publishers import OF_DFLOW
from ops.load_draft.read_config import ReadDraft, read_draft_config, record_mistakes, with_embedding_scale
from ops.load_draft.tensors import DraftTensors, read_tensors

OTHER_TARGET = "target: it was trained for the target"  # how a note begins


def load_draft(config: LoadDraft, stage: Stage) -> None:
    """Write the Draft artifact of a directory or of a model id.

    Raises DataError with every reason why dflow would compute something else than the draft's own class.
    """
    named = config.source if config.revision is None else f"{config.source}@{config.revision}"
    directory = find_draft(config.source, config.revision)
    try:
        import_draft(config, directory, stage)
    except DataError as error:
        text = str(error)
        for folder in (str(stage.out_dir), str(directory)):
            text = text.replace(folder, named)
        raise DataError(text) from error


def import_draft(config: LoadDraft, directory: Path, stage: Stage) -> None:
    """Read a draft's directory, and write it as a serving directory.

    Raises DataError, whose message may name folders that the user does not know.
    """
    target = stage.inputs["target"]
    written, info = read_draft_json(directory), target_info(target)
    target_config = read_config(target.path / "model")
    served = ServedTarget.of(target)
    try:  # the record first: what is read is of the right kind then
        refuse(directory, record_mistakes(written, served.info, served.pad_token_ids), is_imported=True)
        draft = read_draft_config(written, info, config.partial_rotary_factor)
        draft = with_embedding_scale(draft, written, target_config)
    except ConfigError as error:
        raise DataError(f"{directory}: {error}") from error
    record = written.get(OF_DFLOW, {})
    before = record.get("imported", {"assumed": {}, "notes": []})
    trained_for = before.get("trained_for", record.get("target", target.digest))
    earlier = [note for note in before["notes"] if not note.startswith(OTHER_TARGET)]
    notes = []
    is_other = not is_same_target(trained_for, target.digest, target.path)
    if is_other:
        notes.append(f"{OTHER_TARGET} {trained_for[:12]}, and this one, of the same sizes, is {target.digest[:12]}")
    tensors = read_tensors(directory, draft, target)
    imported: dict[str, Any] = {
        "publisher": draft.publisher,
        "assumed": {**before["assumed"], **draft.assumed},
        "notes": list(dict.fromkeys([*earlier, *notes, *draft.notes, *tensors.notes])),
    }
    if is_other:
        imported["trained_for"] = trained_for
    if not Path(config.source).is_dir():  # a path is content, not a name
        imported |= {"source": config.source, "revision": config.revision}
    save_file(dict(tensors.by_name), stage.out_dir / WEIGHTS, metadata={"format": "pt"})
    serving, digest = to_serving(draft.config, tensors.dtype), tensors_digest(stage.out_dir / WEIGHTS)
    refuse(directory, tensors_digest_mistakes(written, digest), is_imported=True)
    server_args, engine = record.get("server_args"), record.get("engine")
    serving["dflow"] |= training_record(draft.config, target.digest, digest, server_args) | {"imported": imported}
    if engine is not None:
        serving["dflow"]["engine"] = engine
    write_json(stage.out_dir / CONFIG, serving)
    parameters = sum(tensor.numel() for tensor in tensors.by_name.values())
    facts = CardFacts(
        draft=draft.config,
        dtype=tensors.dtype,
        parameters=parameters,
        target=info,
        target_digest=target.digest,
        served=Served.as_trained(info, target_config, {"server_args": server_args}, target.path / "model", engine),
        imported=imported,
        target_config=target_config,
    )
    replace_file(stage.out_dir / CARD, model_card(facts).encode())
    check_serving(stage.out_dir, target)
    show(stage, draft, tensors, imported)
    stage.log({"import/parameters": float(parameters), "import/assumed": float(len(draft.assumed))}, step=0)
    stage.progress(1, 1)


def find_draft(source: str, revision: str | None) -> Path:
    """Find a draft's directory; for a model id weights and JSON are downloaded. Raises DataError if it is no draft."""
    directory = Path(source)
    if not directory.exists():
        directory = fetch(
            source, revision, (*CONFIGS, *WEIGHT_FILES, *FORBIDDEN)
        )  # the last are refused, and never read
    mistakes = draft_folder_mistakes(directory)
    if mistakes:
        raise DataError("\n".join(mistakes))
    return directory


def show(stage: Stage, draft: ReadDraft, tensors: DraftTensors, imported: Mapping[str, Any]) -> None:
    """Show what was read and what was assumed, in a few lines."""
    shape = draft.config
    stage.info(
        f"a draft as {draft.publisher} writes it: {shape.num_hidden_layers} layers, blocks of {shape.block_size}, "
        f"target layers {', '.join(map(str, shape.target_layer_ids))}, {tensors.dtype}"
    )
    if draft.assumed:
        listed = ", ".join(f"{name} = {value}" for name, value in sorted(draft.assumed.items()))
        stage.warn(f"config.json leaves open, and these were assumed: {listed}")
    for note in imported["notes"]:
        stage.info(note)
