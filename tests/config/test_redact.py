"""Secrets stay out of what is printed, saved and raised."""

from __future__ import annotations

import logging

import pytest

from ktrainer.config import load_config, redact, resolved_yaml
from ktrainer.config.key_reference import diff_yaml
from ktrainer.config.redact import is_secret_name, redact_text
from ktrainer.errors import ConfigError

PLANTED = "hunter2-swordfish"


@pytest.mark.parametrize(
    "name",
    [
        "password", "db_password", "API_KEY", "apiKey", "apikey", "secret", "client-secret",
        "AWS_SECRET_ACCESS_KEY", "token", "HF_TOKEN", "authToken", "credentials", "userPassword",
    ],
)  # fmt: skip
def test_secret_names(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["monkey", "keys_per_batch", "max_tokens", "tokenizer", "epochs", "keep", "author"]
)
def test_ordinary_names(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "text, clean",
    [
        ("https://me:pw@host/x", "https://***@host/x"),
        ("s3://key@bucket/x", "s3://***@bucket/x"),
        ("https://host/x?token=abc&n=1", "https://host/x?token=***&n=1"),
        ("https://host/x?n=1", "https://host/x?n=1"),
        ("mail me@host", "mail me@host"),
    ],
)
def test_urls(text, clean):
    assert redact_text(text) == clean


def test_nested_values():
    value = {"a": [{"api_key": "x", "n": 1}], "token": {"deep": "y"}, "key": None, "secret": True}
    assert redact(value) == {
        "a": [{"api_key": "***", "n": 1}],
        "token": {"deep": "***"},
        "key": None,
        "secret": True,
    }
    assert redact({"pin": 1234}, ["1234"]) == {"pin": "***"}


def test_numbers_are_settings_if_named_key_or_token():
    value = {"key_dim": 64, "token_dropout": 0.1, "attention_key": {"dims": [16, 32], "of": "x"}}
    assert redact(value) == {**value, "attention_key": {"dims": [16, 32], "of": "***"}}
    key = load_config(None, ["user.key_dim=16"], defaults={"user": {"key_dim": 64}})
    assert key.to_dict(redacted=True)["user"] == {"key_dim": 16}


@pytest.mark.parametrize(
    "value",
    [
        {"db_password": 20231115},
        {"credentials": {"pin": 1234, "key": 5}},
        {"secretKey": 7},
        {"token": {"passphrase": 1.5}},
        {"pwd": [12, {"n": 3}]},
    ],
)
def test_numbers_are_secrets_if_named_like_a_password(value):
    assert not any(sign.isdigit() for sign in str(redact(value)))


@pytest.fixture
def planted(monkeypatch):
    monkeypatch.setenv("SERVICE_TOKEN", PLANTED)
    return load_config(
        {
            "callbacks": {
                "a": {
                    "type": "remote_monitor",
                    "root": "${oc.env:SERVICE_TOKEN}",
                    "path": "/x/${.root}/y",
                    "headers": {"api_key": PLANTED[::-1]},
                }
            },
            "run": {"dir": "runs/${oc.env:SERVICE_TOKEN}"},
            "checkpoint": {"dir": "s3://user:letmein@bucket/x"},
        }
    )


def test_nothing_shown_holds_a_secret(planted):
    assert planted.callbacks["a"]["root"] == PLANTED  # the callback gets it
    again = load_config(planted, ["seed=3"])
    shown = [
        resolved_yaml(planted), resolved_yaml(again), repr(planted), str(again),
        diff_yaml(planted), str(planted.to_dict(redacted=True)),
    ]  # fmt: skip
    for text in shown:
        for secret in (PLANTED, PLANTED[::-1], "letmein"):
            assert secret not in text
    assert "***" in shown[0]


@pytest.mark.parametrize(
    "word",
    [
        "trainer.epochs=${oc.env:SERVICE_TOKEN}",
        "checkpoint.every=${oc.env:SERVICE_TOKEN}",
        "data.batch=${oc.env:SERVICE_TOKEN}",
        "backend=${oc.env:SERVICE_TOKEN}",
        "callbacks.a.type=${oc.env:SERVICE_TOKEN}",
        "run.dir=${${oc.env:SERVICE_TOKEN}}",
        "no_such=${oc.env:SERVICE_TOKEN}",
        f"password={PLANTED}",
        f"trainer.token={PLANTED}",
        f"api_key={PLANTED}: [",
        f"trainer.epochs=https://x:{PLANTED}@host/",
    ],
)
def test_no_error_shows_a_secret(word, monkeypatch, caplog):
    monkeypatch.setenv("SERVICE_TOKEN", PLANTED)
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ConfigError) as caught:
        load_config(None, [word])
    error = caught.value
    assert PLANTED not in f"{error} {error.value!r} {error.__cause__!r} {caplog.text}"


def test_ordinary_environment_variables_are_shown(monkeypatch):
    monkeypatch.setenv("JOB_NAME", "nightly")
    assert "dir: runs/nightly" in resolved_yaml(
        load_config(None, ["run.dir=runs/${oc.env:JOB_NAME}"])
    )
