"""The words of a sweep."""

from __future__ import annotations

import pytest

from ktrainer.errors import ConfigError
from ktrainer.tuning.search_space import Space, grid_size, read_space, split_spaces, word


@pytest.mark.parametrize(
    ("given", "space"),
    [
        ("trainer.epochs=3,5", Space("trainer.epochs", "choice", ("3", "5"))),
        ("user.a = x, y ,z", Space("user.a", "choice", ("x", "y", "z"))),
        ("user.units=[64],[64,64]", Space("user.units", "choice", ("[64]", "[64,64]"))),
        ("user.n={a: 1, b: 2},null", Space("user.n", "choice", ("{a: 1, b: 2}", "null"))),
        ("user.t='a,b',c", Space("user.t", "choice", ("'a,b'", "c"))),
        ("user.lr=log(1e-4,1e-1)", Space("user.lr", "log", (), 1e-4, 1e-1)),
        ("user.lr = log( 1e-4 , 1 )", Space("user.lr", "log", (), 1e-4, 1.0)),
        ("user.p=uniform(-0.5,2)", Space("user.p", "uniform", (), -0.5, 2.0)),
        ("user.k=int(1,8)", Space("user.k", "int", (), 1, 8)),
    ],
)
def test_spaces(given: str, space: Space) -> None:
    assert read_space(given) == space
    assert read_space(f"{space.key}={space}") == space


@pytest.mark.parametrize(
    "given",
    [
        "trainer.epochs=3",
        "user.units=[64,64]",
        "user.n={a: 1, b: 2}",
        "user.t='a,b'",
        "user.t='log(1,2)'",
        "user.t=",
        "user.t=a(b",
        "user.t=(1,2)",
        "run.name=${oc.env:NAME,none}",
    ],
)
def test_one_value(given: str) -> None:
    assert read_space(given) is None
    assert split_spaces([given, "a=1,2"]) == ([Space("a", "choice", ("1", "2"))], [given])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("user.lr=lag(1,2)", "user.lr: there is no space 'lag'. Did you mean log"),
        ("user.lr=loguniform(1,2)", "there is no space 'loguniform'"),
        ("user.lr=log(1)", r"log\(1\) needs two numbers: user.lr=log\(low,high\)"),
        ("user.lr=log(1,2,3)", "needs two numbers"),
        ("user.lr=log(a,b)", "needs two numbers"),
        ("user.lr=log(0,1)", "needs ends above 0"),
        ("user.lr=uniform(2,1)", "needs finite ends, the lower one first"),
        ("user.lr=uniform(0,inf)", "needs finite ends"),
        ("user.lr=uniform(0,nan)", "needs finite ends"),
        ("user.k=int(1,2.5)", "needs two whole numbers"),
        ("user.k=int(0,9007199254740993)", "has ends beyond 2\\*\\*53"),
        ("user.k=int(-99999999999999999999,0)", "has ends beyond"),
        ("user.k=1,,2", "a comma too many"),
        ("user.k=1,", "a comma too many"),
        ("user.k=1,2,1", "names '1' twice"),
        ("user.lr=log(1e-4,1e-1", r"has a \( that does not end: a value with one stands in quotes"),
        ("user.lr=int(3", r"has a \( that does not end"),
        ("user.t=o'neil,b", "has a ' that does not end"),
        ("user.t=[1,2", r"has a \[ that does not end"),
        ("user.lr=log(1e-4,1e-1),0.5", r"has log\(1e-4,1e-1\) among other values"),
    ],
)
def test_a_space_that_cannot_be_read(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_space(given)


@pytest.mark.parametrize("other", ["user.k=1", "user.k=3,4"])
def test_a_key_has_one_word(other: str) -> None:
    with pytest.raises(ConfigError, match=r"user.k: is given twice"):
        split_spaces([other, "user.k=1,2"])


def test_a_word_keeps_every_digit() -> None:
    assert word("user.lr", 0.1 + 0.2) == "user.lr=0.30000000000000004"
    assert word("user.lr", 1e-05) == "user.lr=1e-05"
    assert word("user.k", 3) == "user.k=3"
    assert word("user.t", "[1,2]") == "user.t=[1,2]"


def test_a_grid_has_all_values() -> None:
    two, three = Space("k", "choice", ("a", "b")), Space("k", "int", (), 2, 4)
    assert (list(two.grid()), list(three.grid())) == (["a", "b"], [2, 3, 4])
    assert grid_size([two, three]) == 6
    with pytest.raises(ConfigError, match="there are 2,000,000,000, more than 10,000: name fewer"):
        grid_size([two, Space("k", "int", (), 1, 10**9)])
    with pytest.raises(ConfigError, match=r"k=log\(0.1,1.0\) has no end of them: name some"):
        Space("k", "log", (), 0.1, 1.0).grid()
