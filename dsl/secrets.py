"""Secrets in a config: `${secret:NAME}`, or `${env:NAME}` for names that end like `HF_TOKEN` or `api_key`.

Such a text stays as it is in graphs, records, manifests and MLflow. Only the process that computes the node puts the
environment variable's value in. In a key it is the constant "secret": another token gives the same results. Behind a
second `$` the text means itself: `$${secret:NAME}` reaches the op as `${secret:NAME}`.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import attrs

from dsl.errors import ConfigError

T = TypeVar("T")

LONG_ENOUGH = 6  # characters; what shorter ones look like in Base64 is found in many texts
REDACTED = "***"
CREDENTIALS = re.compile(r"//[^/@\s]+@")
QUERY = re.compile(r"(\w+://[^\s?'\"]+)\?[^\s'\")]+")
BETWEEN = re.compile(r"(?:\x1b\[[0-?]*[ -/]*[@-~]|[\r\n])")
# A value that is no secret must not stay out of the key: MONKEY is none.
_SECRET_NAME = r"\w*(?i:_KEY|APIKEY|TOKEN|SECRET|PASSWORD)|(?i:KEY)"
_SECRET = re.compile(rf"(?P<escape>\$?)\$\{{(?:secret:(?P<secret>\w+)|env:(?P<env>{_SECRET_NAME}))\}}", re.ASCII)


def resolved(config: T) -> T:
    """An op's config with its secrets read from the environment. Raises ConfigError where a variable is not set."""
    changes = {name: _replaced(value, _value_of) for name, value in _with_secrets(config)}
    return attrs.evolve(config, **changes) if changes else config  # type: ignore[misc]


def secret_values(config: object) -> tuple[str, ...]:
    """The secrets' values in a config, which no log may show, longest first.

    Raises ConfigError where a variable is not set.
    """
    return values_of(secret_variables(config))


def secret_variables(config: object) -> tuple[str, ...]:
    """The environment variables of a config's secrets."""
    return tuple(sorted({name for _field, value in _with_secrets(config) for name in secret_names(value)}))


def values_of(variables: Sequence[str]) -> tuple[str, ...]:
    """The values of environment variables that hold secrets, longest first. Raises ConfigError where one is not set."""
    values = {_value_of(name) for name in variables} - {""}
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


def without_credentials(text: str) -> str:
    """The text with `***` in place of user, password and query of every address in it."""
    return QUERY.sub(rf"\1?{REDACTED}", CREDENTIALS.sub(f"//{REDACTED}@", text))


def redact(text: str, values: Sequence[str]) -> str:
    """The text with `***` in place of every secret value, in any of its `written_forms`.

    Line ends and terminal colour sequences between a value's characters do not hide it. Other texts between them do,
    and so do other encodings.
    """
    forms = written_forms(tuple(values))
    for form in forms:
        text = text.replace(form, REDACTED)
    return _split_forms(forms).sub(REDACTED, text) if forms and BETWEEN.search(text) else text


@functools.cache
def _split_forms(forms: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of the longer spellings of secrets, which allows line ends and colour codes between characters."""
    long = [form for form in forms if len(form) >= LONG_ENOUGH]
    return re.compile("|".join(f"{BETWEEN.pattern}*".join(map(re.escape, form)) for form in long) or r"(?!)")


@functools.cache
def written_forms(values: tuple[str, ...]) -> tuple[str, ...]:
    """The forms in which the values may stand in a text, longest first: plain, in Python, JSON, a URL and Base64."""
    forms = set(values)
    for value in values:
        forms |= {repr(value)[1:-1], ascii(value)[1:-1], repr(value + "'\"")[1:-4]}
        forms |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
        raw = value.encode(errors="surrogateescape")
        forms |= _in_addresses(raw)
        if len(value) >= LONG_ENOUGH:
            forms |= _in_base64(raw)
    return tuple(sorted(forms - {""}, key=lambda form: (-len(form), form)))


def _in_addresses(raw: bytes) -> set[str]:
    from urllib.parse import quote, quote_plus

    return {quote(raw, safe=""), quote(raw), quote_plus(raw)}


def _in_base64(raw: bytes) -> set[str]:
    """The Base64 forms by which a value is found anywhere in encoded data: alone, and for each offset of its bytes."""
    forms = set()
    import base64

    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        forms |= {encode(raw).decode(), encode(raw).decode().rstrip("=")}
        for before in range(3):
            whole = encode(b"\0" * before + raw).decode()
            forms.add(whole[-(-before * 8 // 6) : (before + len(raw)) * 8 // 6])
    return forms


def secret_names(value: object) -> tuple[str, ...]:
    """The environment variables of the secrets in a value, including lists and tables, in the order of the text."""
    return tuple(_name(found) for text in texts(value) for found in _SECRET.finditer(text) if not found["escape"])


def without_secrets(value: Any) -> Any:
    """The value as it enters a cache key, with the text "secret" in place of every secret."""
    return _replaced(value, lambda _name: "secret") if may_hold_secrets(value) and secret_names(value) else value


def may_hold_secrets(value: object) -> bool:
    """Whether a value may contain secrets; a quick check, since it runs on every value of every node."""
    if isinstance(value, str):
        return "${" in value
    return attrs.has(type(value)) or (isinstance(value, (tuple, list, dict)) and bool(value))


def resolved_text(text: str) -> str:
    """The text, such as a tracking URI, with its secrets filled in. Raises ConfigError where a variable is not set."""
    return _replaced_in_text(text, _value_of)


def _with_secrets(config: object) -> Iterator[tuple[str, Any]]:
    """The fields of a config whose texts hold a secret or an escaped one (`$$`), with their values."""
    for attribute in attrs.fields(type(config)):  # type: ignore[arg-type]
        value = getattr(config, attribute.name)
        if any(_SECRET.search(text) for text in texts(value)):
            yield attribute.name, value


def texts(value: object) -> Iterator[str]:
    """The texts in a value, lists and tables included, that contain `${`."""
    pending = [value]
    while pending:
        member = pending.pop()
        if isinstance(member, str):
            if "${" in member:
                yield member
        elif isinstance(member, (tuple, list)):
            pending += reversed(member)
        elif isinstance(member, dict):
            pending += reversed(list(member.values()))
        elif attrs.has(type(member)):
            pending += reversed(list(attrs.asdict(member, recurse=False).values()))  # type: ignore[arg-type]


def _replaced(value: Any, replacement: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return _replaced_in_text(value, replacement)
    if isinstance(value, (tuple, list)):
        return type(value)(_replaced(member, replacement) for member in value)
    if isinstance(value, dict):
        return {key: _replaced(member, replacement) for key, member in value.items()}
    if attrs.has(type(value)):
        return attrs.evolve(value, **_replaced(attrs.asdict(value, recurse=False), replacement))
    return value


def _replaced_in_text(text: str, replacement: Callable[[str], str]) -> str:
    return _SECRET.sub(lambda found: found[0][1:] if found["escape"] else replacement(_name(found)), text)


def _name(found: re.Match[str]) -> str:
    return found["secret"] or found["env"]


def _value_of(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError:
        raise ConfigError(f"the environment variable {name} is not set: export it before you call dflow") from None
