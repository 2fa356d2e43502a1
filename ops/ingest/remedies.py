"""What to do about each reason for which `ingest` drops a sample."""

from __future__ import annotations

from ops.ingest import documents, image_folder, image_values, row_values, rows, tools, traffic, turn_forms

ANSWERED_LATER = "set require_answers = false, and let regenerate_answers answer"
NOT_READ = "remove them, or what they hold besides texts and images"
REWRITTEN = (
    'write the calls as "tool_calls", and the tools as "tools"; or set tool_syntax = "text" to learn them as text'
)
ARGUMENTS = 'write "arguments" as an object, or as its JSON'
EXPORTED_AGAIN = "export the conversation again, or remove it"
VALID = "write the texts as valid UTF-8"
REMEDIES = {
    **dict.fromkeys((image_values.VIDEO, image_values.AUDIO), NOT_READ),
    **dict.fromkeys((traffic.CUT, traffic.FAILED, traffic.FILTERED, traffic.REFUSED, traffic.STREAMED), ANSWERED_LATER),
    **dict.fromkeys(
        (traffic.WITH_TOOLS, traffic.WITH_IMAGES, traffic.NOT_KNOWN, traffic.SEVERAL, traffic.NO_MESSAGES),
        "log the requests themselves, with their messages",
    ),
    **dict.fromkeys((rows.PYTHON_CALLS, rows.CALLS_IN_TEXT), REWRITTEN),
    **dict.fromkeys((turn_forms.ARGUMENTS_NOT_JSON, turn_forms.ARGUMENTS_NO_OBJECT), ARGUMENTS),
    **dict.fromkeys((turn_forms.NO_CALL, turn_forms.NO_RESULT, turn_forms.TOO_MANY_CALLS), EXPORTED_AGAIN),
    **dict.fromkeys((tools.NO_JSON, documents.NO_JSON, turn_forms.RESULT_NOT_JSON), "write values that JSON has"),
    traffic.PREFILLED: f"{ANSWERED_LATER} without this beginning",
    traffic.NO_RESPONSE: f"list the batch's output as a source too; or {ANSWERED_LATER}",
    traffic.LOG_CUT: "start SGLang with --log-requests-level 3",
    rows.NO_ANSWER: ANSWERED_LATER,
    rows.NOTHING_LEARNT: "remove the row, or the marks of its answers",
    rows.MIXED: "write a row for each answer that is learnt: the turns up to it, with 0 as the weight of all before it",
    turn_forms.OTHER_WEIGHT: "write 0 or 1: a draft has no other weights",
    turn_forms.PARTLY_LEARNT: "give the text and the calls of an answer the same mark",
    rows.NO_TURNS_AT_ALL: "remove the row, or give it turns",
    rows.EMPTY_TEXT: "remove the turn, or give it a text",
    rows.ANSWER_FIRST: "give the user's turn before it, or remove the answer",
    row_values.INVALID: VALID,
    rows.DIFFER: "write an <image> for each image of the row, or none",
    rows.IN_ANSWER: "remove the image, which no target generates",
    rows.UNKNOWN_PART: 'write parts as {"type": "text", "text"} or {"type": "image", "image"}',
    rows.WITHOUT_TOOLS: 'give each row its "tools", or set default_tools',
    rows.CHANNELS: 'write the analysis as "reasoning_content", and calls as "tool_calls"',
    turn_forms.UNKNOWN_ROLE: "name the role system, user, assistant or tool",
    turn_forms.CALL_NOT_JSON: 'write the call as {"name": ..., "arguments": {...}}',
    turn_forms.ARGUMENTS_ELSEWHERE: f"{ARGUMENTS}, under this key",
    turn_forms.NAMELESS: 'give the call the "name" of its function',
    turn_forms.OUTSIDE_ANSWER: "make it a turn of the assistant's",
    turn_forms.SAME_ID: "give each call of a turn an id of its own, or leave all ids out",
    turn_forms.NOT_OPEN: "give the result the id of its call, or leave all ids out",
    turn_forms.OTHER_CALLS_IN_TEXT: "remove the <tool_call> blocks from the text, or the key, whichever is wrong",
    turn_forms.OTHER_THOUGHT: "remove the text up to </think>, or the key of the reasoning, whichever is wrong",
    turn_forms.REDACTED: "remove the part, or let regenerate_answers answer",
    tools.NO_FUNCTION: "remove what the provider runs itself, with its calls and results",
    image_values.MISSING: "check that the files are where the rows name them, and image_root",
    image_values.OUTSIDE: "set image_root, or allow_outside = true",
    image_values.REMOTE: "download the images, and name the files",
    image_values.UNDECODABLE: "replace the image",
    image_values.UNREADABLE: "check the rights of the file",
    image_values.FILE_TOO_LARGE: "write it as a smaller JPEG or PNG",
    image_folder.NO_IMAGE: "move it out of the folder",
    image_folder.BESIDE: "move the images into the folders of their classes, or all images into one folder without "
    "subfolders",
    image_folder.NO_OBJECT: "rename the folder to use them",
}
IN_DETAILS = (image_values.OUTSIDE, image_values.REMOTE, image_folder.BESIDE, image_folder.NO_OBJECT)


def advised(reason: str, detail: str) -> str:
    """The detail of a dropped sample, with what to do about it."""
    remedy = "" if reason in IN_DETAILS else REMEDIES.get(reason, "")
    return "; ".join(filter(None, (detail, remedy)))
