"""Text-only samples of real prose: passages of the language reference that comes with Python (`pydoc_data.topics`)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pydoc_data.topics import topics

from ops.ingest.sample import RawSample, Turn

SAMPLES = 300
TEST_SAMPLES = 25
VAL_SAMPLES = 8
MIN_WORDS = 32
MAX_WORDS = 60
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z\"*(])")


def prose_samples() -> list[RawSample]:
    """About 300 questions about Python topics, each answered with a passage; splits are chosen by hash of the id.

    A passage of several topics is used once, so that no text of the train split is in the test split.
    """
    candidates = {sample[2]: sample for topic in sorted(topics) for sample in _topic_samples(topic)}
    chosen = sorted(candidates.values(), key=lambda sample: hashlib.sha256(sample[0].encode()).hexdigest())[:SAMPLES]
    splits = ["test"] * TEST_SAMPLES + ["val"] * VAL_SAMPLES + ["train"] * len(chosen)
    samples = [
        RawSample(id=sample_id, split=split, turns=(Turn("user", (question,)), Turn("assistant", (passage,))))
        for split, (sample_id, question, passage) in zip(splits, chosen, strict=False)
    ]
    return sorted(samples, key=lambda sample: sample.id)


def _topic_samples(topic: str) -> Iterator[tuple[str, str, str]]:
    """The id, question and passage of every passage of one topic."""
    text = topics[topic]
    title = text.split("\n", 1)[0].replace('"', "").strip()
    for part, passage in enumerate(passages(text), start=1):
        question = f"What does the Python language reference say about {title}? Give part {part}."
        yield f"prose-{topic}-{part:03d}", question, passage


def passages(text: str) -> list[str]:
    """The runs of whole sentences, 32 to 60 words long and within one paragraph, in order.

    A paragraph is used only if every line starts at the margin: this leaves out headings, code, grammar, tables and
    lists.
    """
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.strip("\n").split("\n")
        if any(line[:1] in " *+|=-~#>" for line in lines) or not paragraph.rstrip().endswith("."):
            continue
        flowing = " ".join(" ".join(lines).replace("- ", "-").split())
        words: list[str] = []
        for sentence in SENTENCE_END.split(flowing):
            words = [*words, *sentence.split()]
            if len(words) >= MIN_WORDS:
                if len(words) <= MAX_WORDS:
                    found.append(" ".join(words))
                words = []
    return found
