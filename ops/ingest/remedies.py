"""What to do about samples that `ingest` drops, by the reason."""

from __future__ import annotations

from ops.ingest.image_folder import BESIDE
from ops.ingest.image_values import AUDIO, MISSING, OUTSIDE, REMOTE, VIDEO
from ops.ingest.rows import CHANNELS, NO_ANSWER, PYTHON_CALLS, WITHOUT_TOOLS
from ops.ingest.traffic import (
    CUT,
    FAILED,
    FILTERED,
    LOG_CUT,
    NO_RESPONSE,
    NOT_KNOWN,
    REFUSED,
    STREAMED,
    WITH_IMAGES,
    WITH_TOOLS,
)

NOT_READ = "remove them, or what they hold besides texts and images"
REMEDIES = {
    MISSING: "check that the files are where the rows name them, and image_root",
    OUTSIDE: "set image_root, or allow_outside = true",
    REMOTE: "download the images, and name the files",
    BESIDE: "move the images into the folders of their classes, or all images into one folder without subfolders",
    NO_ANSWER: "set require_answers = false, and let regenerate_answers answer",
    WITHOUT_TOOLS: 'give each row its "tools", or set default_tools',
    PYTHON_CALLS: 'write the calls as "tool_calls", and the tools as "tools"',
    NO_RESPONSE: "list the batch's output as a source too; or set require_answers = false, and let regenerate_answers "
    "answer",
    **dict.fromkeys(
        (CUT, FAILED, FILTERED, REFUSED, STREAMED), "set require_answers = false, and let regenerate_answers answer"
    ),
    LOG_CUT: "start SGLang with --log-requests-level 3",
    **dict.fromkeys((WITH_TOOLS, WITH_IMAGES, NOT_KNOWN), "log the requests themselves, with their messages"),
    CHANNELS: 'write the analysis as "reasoning_content", and calls as "tool_calls"',
    **dict.fromkeys((VIDEO, AUDIO), NOT_READ),
}
