"""Declaration of `ingest`: conversations and their images, from files, a folder, or the built-in sample."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attrs import asdict, frozen, validators

from dsl.op import field, is_builtin, op, seed_field
from ops.artifacts import Samples

if TYPE_CHECKING:
    from ops.ingest.read import Reading

LABEL = "{label}"
GROUP = "category"
CallIds = Literal["given", "kimi"]
ToolSyntax = Literal["calls", "text"]


@frozen(kw_only=True)
class Columns:
    """The columns of the data that hold what the keys of rows hold elsewhere."""

    messages: str | None = field(default=None, help="the turns, a list or its JSON")
    prompt: str | None = field(default=None, help="what is asked, with or without completion")
    completion: str | None = field(default=None, help="its answer")
    question: str | None = field(default=None, help="what is asked; default, with answer: the node's question")
    answer: str | None = field(default=None, help="its answer")
    instruction: str | None = field(default=None, help="what is asked, with output")
    input: str | None = field(default=None, help="what follows the instruction")
    output: str | None = field(default=None, help="its answer")
    reasoning: str | None = field(default=None, help="the reasoning of its answer, both texts")
    system: str | None = field(default=None, help="the system's turn")
    tools: str | None = field(default=None, help="a list of tools, or its JSON")
    image: str | None = field(default=None, help="one image, or a list")
    id: str | None = field(default=None, help="of the sample")
    split: str | None = field(default=None, help="train, val or test")
    label: str | None = field(default=None, help="what a right answer says")

    @property
    def given(self) -> dict[str, str]:
        """The column of each key that has one."""
        return {key: column for key, column in asdict(self).items() if column is not None}


@op(
    version=8,
    run="ops.ingest.run:ingest",
    key_libraries=("pillow", "pyarrow", "datasets"),
    single_process=True,
)
@frozen(kw_only=True)
class Ingest:
    """Read conversations and their images, and give every sample a split."""

    source: str | tuple[str, ...] = field(
        external=True,
        help="a file (JSON lines, a JSON array, CSV, Parquet; JSON and CSV also as .gz or .zst) or a folder (of such "
        "files, an Arrow data set of the library `datasets`, images by class or without classes), or "
        '"builtin:digits": 1,797 real handwritten digits with questions, and prose. Or a list of files and folders, '
        "which are read one after the other",
    )
    format: Literal["auto", "json", "csv", "parquet", "arrow", "image-folder"] = field(
        default="auto",
        help='of the source; "auto" detects it. Rows of all but "image-folder" may have the form of '
        "conversations, OpenAI messages, LLaVA / ShareGPT, prompt and completion, Alpaca, Dolly, or question and "
        "answer, calls of tools in the forms of docs/data.md, or be a server's log or a batch of OpenAI",
    )
    columns: Columns | None = field(
        default=None,
        keyed_default=False,
        help='columns of other names, such as { image = "file_name", answer = "caption" }',
    )
    image_root: str | tuple[str, ...] | None = field(
        default=None,
        help="folder of relative image paths, itself relative to the file's own folder, which is the default. Or a "
        'list, one for each source, in which "" is the default; it does not apply to images by class',
    )
    allow_outside: bool = field(
        default=False,
        help="also use images outside that folder, and data files that are links out of theirs; otherwise samples of "
        "such images are dropped and counted, and such a file is an error",
    )
    duplicate_ids: Literal["refuse", "number"] = field(
        default="refuse", help='two samples with one id are an error, or ("number") the second becomes "id#2"'
    )
    duplicates: Literal["keep", "drop"] = field(
        default="keep",
        help='samples with the same turns and images under different ids: "keep" warns if val or test has some of '
        'train, "drop" uses only the first one, whatever its split, of those that max_samples leaves',
    )
    question: str = field(
        default="What is in the image?",
        help="for images by class: the user's turn; {label} is the name of the class. Also for captions, and for "
        "columns with an answer and no question",
    )
    answer: str = field(
        default=LABEL, help="for images by class: the assistant's turn; {label} is the name of the class"
    )
    split: Literal["train", "val", "test"] | None = field(
        default=None, help="of all samples, whatever rows and names of files say; default: theirs, or by hash of the id"
    )
    val_fraction: float = field(
        default=0.02,
        validator=validators.and_(validators.ge(0), validators.lt(1)),
        help="share of val among the samples without a split of their own, by hash of the id",
    )
    test_fraction: float = field(
        default=0.1,
        validator=validators.and_(validators.ge(0), validators.lt(1)),
        help="the same for test",
    )
    require_answers: bool = field(
        default=True,
        help="drop conversations without an answer; false keeps those that end with the user's turn, for "
        "regenerate_answers to answer, or for evaluate (prompts_only of tokenize_chat)",
    )
    default_tools: str | None = field(
        default=None,
        external=True,
        keyed_default=False,
        help="a JSON file with a list of tools, for samples without any of their own; a conversation that calls tools "
        "and has none is dropped",
    )
    tool_syntax: ToolSyntax = field(
        default="calls",
        keyed_default=False,
        help='of calls that an answer has as text in a form that is not read, such as [f(x="1")] of ToolACE: "calls" '
        'drops the conversation, "text" keeps it as plain chat, in which results behind such an answer are the user\'s',
    )
    call_ids: CallIds = field(
        default="given",
        keyed_default=False,
        help='ids of calls: "given", those of the rows, or made where some are missing; "kimi", functions.NAME:0, '
        "functions.NAME:1, ... in calls and results, as Kimi K2 writes them",
    )
    learnt_in_requests: Literal["all", "last"] = field(
        default="all",
        keyed_default=False,
        help='answers that are learnt in a request of a server\'s log or batch: "last" where the log has the earlier '
        "ones as requests of their own, which regenerate_answers then keeps as they are; other rows learn all",
    )
    group: str = field(
        default=GROUP,
        keyed_default=False,
        validator=validators.min_len(1),
        help='the field of the rows by whose values tau is reported, "source" for example; its text or integer is kept '
        "with the sample",
    )
    max_samples: int | None = field(
        default=None,
        validator=validators.optional(validators.ge(1)),
        help="use only this many samples of each category, spread over the splits",
    )
    min_per_split: int = field(
        default=1,
        validator=validators.ge(1),
        help="with max_samples: at least this many samples of each category in every split that has as many, if "
        "max_samples allows it",
    )
    max_dropped: int | None = field(
        default=None, validator=validators.optional(validators.ge(0)), help="fail when more samples are dropped"
    )
    seed: int | None = seed_field()
    output = Samples

    def __attrs_post_init__(self) -> None:
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError("val_fraction and test_fraction leave nothing to train on: their sum must be below 1")
        if not isinstance(self.source, str) and not self.source:
            raise ValueError("source must name at least one file or folder")
        if not isinstance(self.source, str) and any(is_builtin(source) for source in self.source):
            raise ValueError('the sample "builtin:digits" cannot be one of several sources')
        if isinstance(self.image_root, tuple) and len(self.image_root) != len(self.reading().sources):
            raise ValueError(
                f"image_root lists {len(self.image_root)} folders for {len(self.reading().sources)} sources: list one "
                'for each source, "" where it is the file\'s own folder'
            )
        if self.default_tools is not None and is_builtin(self.source):
            raise ValueError("default_tools is for data of your own: the built-in sample has no tools")
        if (self.tool_syntax, self.call_ids) != ("calls", "given") and is_builtin(self.source):
            raise ValueError("tool_syntax and call_ids are for data of your own: the built-in sample has no tools")
        if self.group != GROUP and is_builtin(self.source):
            raise ValueError("group is for data of your own: rows of the built-in sample have no further fields")
        if self.learnt_in_requests != "all" and is_builtin(self.source):
            raise ValueError("learnt_in_requests is for data of your own: the built-in sample has no requests")
        if self.columns is not None and is_builtin(self.source):
            raise ValueError("columns is for data of your own: the built-in sample has none")
        if self.columns is not None and not self.columns.given:
            raise ValueError('columns names no column: write for example { image = "file_name", answer = "caption" }')
        if LABEL not in self.answer:
            raise ValueError(f'answer must contain "{LABEL}", which becomes the name of the class')

    def reading(self) -> Reading:
        """The way in which the config's sources are read."""
        from ops.ingest.read import Reading  # slow, and of no use to the built-in sample

        return Reading(
            sources=tuple(map(Path, [self.source] if isinstance(self.source, str) else self.source)),
            format=self.format,
            image_root=self.image_root,
            allow_outside=self.allow_outside,
            duplicate_ids=self.duplicate_ids,
            question=self.question,
            answer=self.answer,
            require_answers=self.require_answers,
            default_tools=self.default_tools,
            tool_syntax=self.tool_syntax,
            call_ids=self.call_ids,
            group=self.group,
            columns=self.columns,
        )

    def external_files(self) -> Mapping[str, Path | None]:
        """The external files of the config: image files that the sources name, or the built-in sample's data files.

        Several sources are included themselves, since their names are part of ids and may name splits.
        """
        if self.source == "builtin:digits":
            return builtin_files()
        from ops.ingest.read import named_images

        reading = self.reading()
        if not all(source.exists() for source in reading.sources):
            return {}
        several = len(reading.sources) > 1
        named = dict(zip(reading.names(), reading.sources, strict=True)) if several else {}
        return {**named, **dict(named_images(reading))}


def builtin_files() -> dict[str, Path | None]:
    """The data files of scikit-learn's digits and of the standard library's prose, found without importing either."""
    sklearn, prose = find_spec("sklearn"), find_spec("pydoc_data.topics")
    digits = Path(sklearn.origin).parent / "datasets" / "data" / "digits.csv.gz" if sklearn and sklearn.origin else None
    return {"digits": digits, "prose": Path(prose.origin) if prose and prose.origin else None}
