"""What a bucket's own libraries raise is told in one line, as that of the file system is."""

from __future__ import annotations

import sys
import types

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from imitated_runs import run, toy_pipeline

from executor.cli import main

KINDS = [
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("azure.core.exceptions", "AzureError"),
]


@pytest.fixture
def toy(tmp_path):
    toy = toy_pipeline(tmp_path)
    run(toy)
    return toy


@pytest.fixture
def bucket(monkeypatch):
    """Makes the file system `refusing://` raise errors of a class that a library has under this name."""

    def refuse(module, name):
        error = type("Unable", (type(name, (Exception,), {}),), {})
        library = types.ModuleType(module)
        setattr(library, name, error.__base__)
        monkeypatch.setitem(sys.modules, module, library)

        def raises(*_arguments, **_named):
            raise error("Unable to locate credentials")

        methods = dict.fromkeys(("cat_file", "ls", "find", "info", "exists", "put_file", "get_file"), raises)
        refusing = type("Refusing", (MemoryFileSystem,), {"protocol": "refusing", "cachable": False, **methods})
        fsspec.register_implementation("refusing", refusing, clobber=True)
        return "refusing://bucket/captures"

    return refuse


@pytest.mark.parametrize("command", ["push", "pull"])
@pytest.mark.parametrize(("module", "name"), KINDS)
def test_a_refusal_is_told_in_one_line(toy, bucket, capsys, command, module, name):
    url = bucket(module, name)
    assert 1 == main([command, url, "--store", str(toy.store)])
    said = f"dflow: {url}: cannot be reached or used: Unable to locate credentials\n"
    assert said == capsys.readouterr().err


def test_a_mistake_of_dflow_itself_is_not_taken_for_one(toy, bucket, monkeypatch):
    url = bucket("botocore.exceptions", "BotoCoreError")
    monkeypatch.delitem(sys.modules, "botocore.exceptions")
    with pytest.raises(Exception, match="Unable to locate credentials"):
        main(["push", url, "--store", str(toy.store)])
