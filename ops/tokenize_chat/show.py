"""Report sections of `tokenize_chat`: counts, lengths, and the preview of the loss mask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ops.lib.data.files import read_json
from ops.lib.report_sections import ROWS_READ, Html, Section, Table, account_sections, first_rows, shard_counts, spread


def report(folder: Path) -> Sequence[Section]:
    """The report sections of tokens: account of samples, tokens by split, lengths of samples, and preview.html."""
    rows = first_rows(folder / "samples.jsonl")
    lengths = [row["tokens"] for row in rows]
    learnt = sum(row["loss_tokens"] for row in rows) / sum(lengths)
    note = f"{learnt:.1%} of the tokens are in the loss mask"
    if len(rows) == ROWS_READ:
        note += f"; of the first {ROWS_READ} samples"
    samples, tokens = shard_counts(read_json(folder / "tokens.json")["shards"])
    by_split = [(split, samples[split], tokens[split]) for split in samples]
    preview = (folder / "preview.html").read_text(encoding="utf-8")
    return [
        *account_sections(folder),
        Section("tokens", Table(("split", "samples", "tokens"), by_split)),
        Section("tokens of a sample", spread(lengths), note),
        Section("loss mask", Html(preview, height=560)),
    ]
