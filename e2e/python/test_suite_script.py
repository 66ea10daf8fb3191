"""scripts/test.py counts what continuous integration believes: it must not turn a failure into a pass."""

import importlib.util
import os
import sys

import pytest
from conftest import ROOT


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("suite", ROOT / "scripts" / "test.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "suite", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CI", False)
    return module


def run(suite, script: str, **fields):
    return suite.run(suite.Tier("t", ["sh", "-c", script], 1, **fields), dict(os.environ))


CARGO_LINE = "test result: {}. {} passed; {} failed; {} ignored; 0 measured; 0 filtered out; finished in 0.00s"


def test_counts_are_summed_over_binaries_and_frameworks(suite):
    lines = [CARGO_LINE.format("ok", 12, 0, 1), "3 passed in 0.5s", CARGO_LINE.format("FAILED", 4, 2, 0)]
    lines += ["=== 1 failed, 5 passed, 2 skipped, 1 warning in 61.20s (0:01:01) ===", "2 errors in 0.1s"]
    script = "; ".join(f"echo '{line}'" for line in lines)
    assert run(suite, script) == suite.Counts(passed=24, failed=5, skipped=3)


def test_words_of_a_test_are_no_summary(suite):
    script = f"echo 'it says 7 passed in spirit'; echo ' {CARGO_LINE.format('ok', 9, 0, 0)}'; echo '1 passed in 0.1s'"
    assert run(suite, script) == suite.Counts(passed=1)


def test_a_tier_that_ends_badly_without_a_failed_test_is_a_failure(suite):
    assert run(suite, "echo '8 passed in 1.0s'; exit 101") == suite.Counts(passed=8, failed=1)
    assert run(suite, "kill -9 $$", counts=False) == suite.Counts(failed=1)


def test_a_tier_without_a_single_test_is_a_failure(suite):
    assert run(suite, "true") == suite.Counts(failed=1)
    assert run(suite, "true", counts=False) == suite.Counts()


def test_a_skipped_test_is_a_failure_under_ci(suite, monkeypatch: pytest.MonkeyPatch):
    script = "echo '4 passed, 2 skipped in 1.0s'"
    assert run(suite, script) == suite.Counts(passed=4, skipped=2)
    monkeypatch.setattr(suite, "CI", True)
    assert run(suite, script) == suite.Counts(passed=4, failed=2)


def test_a_tier_that_cannot_run_here_is_skipped_by_name_and_a_failure_under_ci(suite, monkeypatch, capsys):
    script, lacks = "echo '4 passed in 1.0s'", lambda: "no such thing"
    assert run(suite, script, lacks=lacks) == suite.Counts(skipped=1)
    assert "t: skipped: no such thing" in capsys.readouterr().out
    assert run(suite, script, lacks=lacks, counts=False) == suite.Counts()
    monkeypatch.setattr(suite, "CI", True)
    assert run(suite, script, lacks=lacks) == suite.Counts(failed=1)


def test_a_tier_that_hangs_is_killed_with_its_children_and_fails(suite, monkeypatch: pytest.MonkeyPatch):
    tier = suite.Tier("t", ["sh", "-c", "echo '1 passed in 0.1s'; sleep 100 & sleep 100"], 0.005)
    assert suite.run(tier, dict(os.environ)) == suite.Counts(passed=1, failed=1)
