"""Declaration of `regenerate_answers`: the target answers the prompts of the samples."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal
from urllib.parse import urlsplit

from attrs import frozen, validators

from dsl.convert import Given, Needs, Only
from dsl.errors import ConfigError
from dsl.op import field, op, seed_field
from ops.artifacts import ImageSamples, TargetModel
from ops.lib.data.tool_forms import GIVEN, ToolsAs
from ops.lib.vision.processor_files import ordered_pixels

# Parameters that the op's fields set, or that would change the form of the response.
OWN_PARAMETERS = (
    "model",
    "messages",
    "tools",
    "tool_choice",
    "temperature",
    "top_p",
    "max_tokens",
    "seed",
    "chat_template_kwargs",
    "n",
    "stream",
)

JUDGEMENT = "judgement.json"  # of a trial's artifact

History = Literal["own", "data"]
ToolResults = Literal["same_name", "same_call", "none"]
NEEDS_TARGET = Needs(
    "huggingface",
    'backend = "huggingface" needs a target; backend = "endpoint" can use a processor instead',
    ("target",),
)
ENDPOINT_ONLY = Only("backend", "endpoint", "'{name}' is for backend = \"endpoint\" only")
DRAWN = ("top_k", "min_p")  # of extra_body, which the checkpoint sets with sampling = "checkpoint"
BY_FIELDS = Only("sampling", "greedy", "'{name}' is the checkpoint's with sampling = \"checkpoint\": leave it out")
NO_SERVER = Only("backend", "huggingface", "'{name}' is set on the server with backend = \"endpoint\": leave it out")


@op(
    version=6,
    run="ops.regenerate_answers.run:regenerate_answers",
    key_libraries=("torch", "transformers", "tokenizers", "pillow"),
    resumable=True,
    single_process=True,
    shares_shards=True,
    gpu=True,
)
@frozen(kw_only=True)
class RegenerateAnswers:
    """Replace the answers of the samples by the target's own, turn by turn."""

    samples: ImageSamples
    target: TargetModel | None = None
    answers: Literal["target", "data"] = field(
        default="target",
        help='"target": the target answers; "data": the answers of the data set are trained on, and nothing is '
        "generated, whatever the other fields say",
    )
    backend: Literal["huggingface", "endpoint"] = field(
        default="huggingface",
        validator=NEEDS_TARGET,
        help='"huggingface": the target is loaded here; "endpoint": a server answers',
    )
    processor: str | None = field(
        default=None,
        validator=ENDPOINT_ONLY,
        external=True,
        model_id=True,
        pinned_by="revision",
        help="for a server whose target is not a node: checkpoint directory or model id with the target's tokenizer, "
        "chat template and image processor; no weights are read",
    )
    revision: str | None = field(
        default=None, validator=ENDPOINT_ONLY, help="the commit of that model id, 40 hex digits: a branch may move"
    )
    chat_template: str | None = field(
        default=None,
        validator=Given(
            "chat_template goes with a processor: a target has its own, which load_target can replace",
            given=("processor",),
        ),
        external=True,
        help="a file with the chat template (jinja) that the server uses, if it is not the processor's",
    )
    trust_remote_code: bool = field(
        default=False,
        help="run the code that comes with the tokenizer of `processor`; a target brings its own permission",
    )
    endpoint: str | None = field(
        default=None,
        validator=ENDPOINT_ONLY,
        neutral=True,
        help='base URL of an OpenAI-compatible server ("http://host:30000/v1")',
    )
    model: str | None = field(
        default=None, validator=ENDPOINT_ONLY, help="name under which the server serves the target"
    )
    dialect: Literal["auto", "openai", "sglang", "vllm"] = field(
        default="auto",
        validator=ENDPOINT_ONLY,
        help='parameters that the server accepts besides OpenAI\'s; "auto": by the owner that it reports for a model',
    )
    extra_body: dict[str, Any] | None = field(
        default=None,
        validator=ENDPOINT_ONLY,
        help="further parameters of every request, such as { presence_penalty = 1.5 }; they are recorded",
    )
    api_key_env: str | None = field(
        default=None,
        validator=ENDPOINT_ONLY,
        neutral=True,
        help="environment variable with the API key, which is never recorded",
    )
    concurrency: int = field(
        default=32, validator=validators.ge(1), neutral=True, help="requests in flight to the server at the same time"
    )
    retries: int = field(
        default=8,
        validator=validators.ge(0),
        neutral=True,
        help="retries of a request after a failure of the server or the network",
    )
    backoff_s: float = field(
        default=1.0,
        validator=validators.ge(0),
        neutral=True,
        help="seconds before the first retry, doubled each time up to a minute; the server may request more",
    )
    timeout_s: float = field(
        default=600.0, validator=validators.gt(0), neutral=True, help="seconds for one request and its answer"
    )
    splits: tuple[Literal["train", "val", "test"], ...] = field(
        default=("train", "val"), help="the splits to answer again; samples of other splits stay unchanged"
    )
    sampling: Literal["greedy", "checkpoint"] = field(
        default="greedy",
        keyed_default=False,
        help='"greedy": the most likely token, unless temperature is set; "checkpoint": drawn with temperature, top_p, '
        "top_k and min_p of the target's generation_config.json",
    )
    temperature: float = field(
        default=0.0, validator=[validators.ge(0), BY_FIELDS], help="of the sampling; 0: the most likely token"
    )
    top_p: float = field(
        default=1.0,
        validator=[validators.gt(0), validators.le(1), BY_FIELDS],
        help="sample among the most likely tokens that together reach this probability",
    )
    max_new_tokens: int = field(default=1024, validator=validators.ge(1), help="tokens of one answer, its EOS included")
    max_prompt_tokens: int = field(
        default=3072, validator=validators.ge(1), help="samples with a longer prompt are dropped, never cut"
    )
    enable_thinking: bool | None = field(
        default=None, help="for chat templates that have it; default: that of the template"
    )
    tools_as: ToolsAs = field(
        default=GIVEN,
        keyed_default=False,
        help="the form of tools in prompts that are rendered here: that of the data, or that in which the server of an "
        "engine writes them",
    )
    min_pixels: int | None = field(
        default=None, validator=validators.optional(validators.ge(1)), help="default: the processor's own"
    )
    max_pixels: int | None = field(
        default=None,
        validator=[validators.optional(validators.ge(1)), ordered_pixels],
        help="default: the processor's own",
    )
    image_backend: Literal["pillow", "torchvision"] = field(
        default="pillow", help="the library that resizes images; torchvision must be installed"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32", validator=NO_SERVER, help="of the forward pass"
    )
    prompts: Literal["messages", "ids"] = field(
        default="messages",
        validator=ENDPOINT_ONLY,
        keyed_default=False,
        help='what a server gets: "messages", which it renders itself, or the token "ids" of dflow\'s own prompt '
        "(SGLang and vLLM, texts only); calls then come as text",
    )
    history: History = field(
        default="own",
        keyed_default=False,
        help='earlier answers in a prompt: the target\'s own ("own"), or the data\'s ("data"), and then each answer is '
        "a sample of its own, for data whose calls the target does not repeat",
    )
    tool_results: ToolResults = field(
        default="same_name",
        keyed_default=False,
        help='the data\'s results of calls are used where the target calls the same functions ("same_name"), with the '
        'same arguments too ("same_call"), or never ("none"); else a conversation ends with the target\'s call',
    )
    history_reasoning: Literal["kept", "dropped"] = field(
        default="kept",
        keyed_default=False,
        help='whether prompts have the reasoning of earlier answers: "dropped" if clients do not send it back; '
        "tokenize_chat needs the same",
    )
    finish_reasons: tuple[Literal["stop", "length"], ...] = field(
        default=("stop",),
        validator=validators.min_len(1),
        help='keep answers that ended like this: "stop" by an EOS token, "length" at max_new_tokens',
    )
    min_answer_tokens: int = field(
        default=2, validator=validators.ge(1), help="samples with a shorter answer are dropped; EOS counts"
    )
    max_answer_tokens: int | None = field(
        default=None,
        validator=validators.optional(validators.ge(1)),
        help="samples with a longer answer are dropped; EOS counts",
    )
    drop_repetitions: bool = field(
        default=False,
        keyed_default=False,
        help="drop samples with an answer that repeats itself, such as one that was cut in a loop; answers whose ids a "
        "server does not report are not examined",
    )
    drop_retokenised: bool = field(
        default=False,
        help="drop samples with an answer whose text gives other tokens than the target generated, where a server "
        "reports no ids of them; answers with ids are learnt as they are",
    )
    trial: bool = field(
        default=False,
        keyed_default=False,
        help="set by `dflow run FILE --smoke 16`: answers are drawn at random and all kept, so that a target trained "
        "for a few steps gives some too; a few prompts are answered as the other fields say, and judged by them",
    )
    batch_tokens: int = field(
        default=16384,
        validator=validators.ge(1),
        neutral=True,
        help="padded tokens of one batch, new ones included",
    )
    shard_samples: int = field(
        default=256, validator=validators.ge(1), neutral=True, help="samples whose next turn is answered together"
    )
    max_dropped: int | None = field(
        default=None,
        validator=validators.optional(validators.ge(0)),
        neutral=True,
        help="fail when more samples are dropped; does not affect caching, so finished shards survive a change of it",
    )
    seed: int | None = seed_field()
    output = ImageSamples

    def __attrs_post_init__(self) -> None:
        mistakes = [*self._endpoint_mistakes()] if self.backend == "endpoint" else []
        if mistakes:
            raise ValueError("; ".join(mistakes))

    def _endpoint_mistakes(self) -> Iterator[str]:
        if self.endpoint is None:
            yield 'backend = "endpoint" needs an endpoint, the base URL of the server ("http://host:30000/v1")'
        elif fault := url_fault(self.endpoint):
            yield f'endpoint = "{fault[1]}" {fault[0]}'
        if not self.model:
            yield 'backend = "endpoint" needs a model, the name under which the server serves the target'
        if (self.target is None) == (self.processor is None):
            yield (
                'backend = "endpoint" needs either a target or a processor (checkpoint directory or model id): prompts '
                "are counted, and answers compared, with the target's own tokenizer and chat template"
            )
        if self.prompts == "ids" and self.dialect == "openai":
            yield (
                'prompts = "ids" needs the requests of SGLang or vLLM, and dialect = "openai" has no ids: set dialect '
                'to that of the server, or prompts = "messages"'
            )
        if drawn := [name for name in DRAWN if self.sampling == "checkpoint" and name in (self.extra_body or {})]:
            yield f'extra_body may not contain {", ".join(drawn)} with sampling = "checkpoint", which sets it'
        if own := [name for name in OWN_PARAMETERS if name in (self.extra_body or {})]:
            yield f"extra_body may not contain {', '.join(own)}: set the op's own fields"

    def chosen_libraries(self) -> tuple[str, ...]:
        """The further libraries whose versions enter the key, besides key_libraries."""
        return ("torchvision",) if self.image_backend == "torchvision" else ()


def url_fault(url: str) -> tuple[str, str] | None:
    """The mistake in a base URL, and the URL without secrets; None if it is valid."""
    try:
        parts = urlsplit(url)
        password, host = parts.password or parts.username, parts.hostname
    except ValueError as error:
        return f"is not a URL: {error}", url
    if password is not None:
        shown = url.replace(parts.netloc.rpartition("@")[0], "...")
        return "has a user or a password, which would be recorded: use api_key_env", shown
    if parts.scheme not in ("http", "https") or not host:
        return "is not a URL of the form http://host:port/v1 or https://host/v1", url
    if parts.query or parts.fragment:
        return "has a part after ? or #: give only the base URL", f"{parts.scheme}://{parts.netloc}{parts.path}"
    return None


def api_key(config: RegenerateAnswers) -> str | None:
    """The server's API key from the environment, None if no variable is set in the config.

    Raises ConfigError if the variable holds no key.
    """
    name = config.api_key_env
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(
            f'api_key_env = "{name}": this environment variable is not set: '
            f"export {name}=... with the server's API key"
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f'api_key_env = "{name}": the variable must be one line of ASCII')
    return key
