"""Keep secrets out of printed and saved text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import NoneType
from typing import Any

REDACTED = "***"

_SECRET_WORDS = {
    "password", "passwd", "pwd", "passphrase", "token", "secret", "key", "apikey",
    "credential", "credentials", "authorization", "auth", "bearer",
}  # fmt: skip
_SECRET_ENDINGS = ("password", "passphrase", "secret", "token", "apikey", "accesskey", "secretkey")
_URL_LOGIN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\s?#]+@")
_URL_QUERY = re.compile(r"([?&;]([A-Za-z0-9_.~-]+)=)([^&;#\s]+)")
# A shorter value may be part of ordinary text, which replacing it would garble.
_SHORTEST = 3


def is_secret_name(name: str) -> bool:
    """Whether a key or environment variable called `name` is likely to hold a secret."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name))
    words = [w for w in re.split(r"[^a-z0-9]+", spaced.lower()) if w]
    return bool(_SECRET_WORDS.intersection(words)) or "".join(words).endswith(_SECRET_ENDINGS)


def _hides_numbers(name: str) -> bool:
    """Whether a number called `name` is likely to be a secret, too: `key_dim` and `token_dropout`
    are settings of a model."""
    return is_secret_name(re.sub("key|token", "_", str(name), flags=re.IGNORECASE))


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without the given secrets and without logins and tokens in URLs."""
    for secret in sorted({s for s in secrets if len(s) >= _SHORTEST}, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    text = _URL_LOGIN.sub(rf"\g<1>{REDACTED}@", text)
    return _URL_QUERY.sub(lambda m: m[1] + REDACTED if is_secret_name(m[2]) else m[0], text)


def secrets_in(value: Any, name: str = "") -> list[str]:
    """The texts in a nested structure that `redact` replaces because of their keys' names."""
    if isinstance(value, dict):
        inside = is_secret_name(name)
        found = ((inner, name if inside else str(key)) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        found = ((inner, name) for inner in value)
    else:
        return [value] if isinstance(value, str) and is_secret_name(name) else []
    return [secret for inner, key in found for secret in secrets_in(inner, key)]


def redact(value: Any, secrets: Iterable[str] = (), name: str = "") -> Any:
    """A copy of a nested structure in which secrets are replaced by `***`.

    A value is a secret when its key's name says so, or that of a group around it, but for numbers
    named key or token alone; and when it came from an environment variable whose name says so
    (`secrets`), or as the login part of a URL.

    Args:
        value: nested dicts, lists and plain values.
        secrets: texts to replace wherever they occur.
        name: the key that holds `value`.
    """
    secrets = tuple(secrets)
    if isinstance(value, dict):
        inside = is_secret_name(name)
        return {
            redact_text(k, secrets) if isinstance(k, str) else k: redact(
                v, secrets, name if inside and not _hides_numbers(k) else str(k)
            )
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact(item, secrets, name) for item in value]
    is_secret = _hides_numbers if isinstance(value, (int, float)) else is_secret_name
    if is_secret(name) and not isinstance(value, (bool, NoneType)):
        return REDACTED
    if isinstance(value, str):
        return redact_text(value, secrets)
    if not isinstance(value, bool) and str(value) in secrets:
        return REDACTED
    return value
