"""`make quick FILE=`: which tests are taken for a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import quick
import time_limit
from import_graph import ROOT
from kinds import kind_of

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("dsl/interpolation.py", "dsl/test_values.py"),
        ("executor/keys/external_inputs.py", "executor/keys/test_external.py"),
        ("ops/lib/drafts/losses/slots.py", "ops/lib/drafts/test_dflash_anchors.py"),
    ],
)
def test_tests_that_import_a_file_on_any_way_are_taken_the_nearest_first(file, test):
    taken = quick.affected([ROOT / file])
    assert ROOT / "tests" / test in taken
    far = [quick.distance(path, [ROOT / file]) for path in taken]
    assert None not in far and far == sorted(far)
    assert {"unit"} == {kind_of(path) for path in taken}


def test_the_test_named_after_a_file_comes_first_whatever_its_kind():
    for file in ("executor/launchers/host_run.py", "executor/store/lease.py"):
        first = quick.affected([ROOT / file])[0]
        assert first == (ROOT / "tests" / file).with_name(f"test_{Path(file).name}")
        assert "process" == kind_of(first)


def test_where_no_unit_test_is_near_the_nearest_of_any_kind_are_taken():
    file = ROOT / "tests" / "support" / "toys" / "tracked_toy.py"
    taken = quick.affected([file])
    assert {1} == {quick.distance(path, [file]) for path in taken}
    assert {"process"} == {kind_of(path) for path in taken}


def test_a_file_that_is_not_there_is_named(capsys):
    assert 2 == quick.main(["ops/nothing.py"])
    assert "ops/nothing.py; give paths from the project's root" in capsys.readouterr().err


def test_what_has_not_begun_in_time_is_skipped(pytester):
    pytester.makeconftest("import time_limit\ndef pytest_configure(config): config.pluginmanager.register(time_limit)")
    pytester.makepyfile("import time\ndef test_first(): time.sleep(0.1)\ndef test_second(): pass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(time_limit.SECONDS, "0.05")
        patch.setattr(time_limit, "BEGAN", [])
        pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1, skipped=1)
