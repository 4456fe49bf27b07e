"""The task registry: certificates and versions, on both databases."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.db.engine import Ledger
from parl.store.tasks import TaskRegistry
from sandbox.check.archive import unpack_folder
from sandbox.check.certificate import issue, write_certificate
from sandbox.check.findings import CheckReport, Step
from sandbox.check.keys import load_key
from sandbox.check.subject import content_hash
from sandbox.errors import TaskError
from sandbox.task import load_task
from sandbox.templates.new import write_task


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return write_task(tmp_path / "task", "acme/task", "python")


def certify(folder: Path) -> CheckReport:
    """The certificate that a passed check would write."""
    report = CheckReport(
        str(folder), "acme/task", "1", content_hash(folder), steps=[Step("oracle")]
    )
    report.flake = {"repeat": 5}
    write_certificate(folder, issue(report, load_key()))
    return report


def test_versions_count_up_and_come_back(ledger: Ledger, folder: Path, tmp_path: Path):
    """New content, new version; the archive of any version is the folder as it was."""
    registry = TaskRegistry(ledger)
    certify(folder)
    first = registry.publish(folder)
    (folder / "instruction.md").write_text("Another wording.\n")
    certify(folder)
    second = registry.publish(folder)
    assert (first.version, second.version) == (1, 2)
    assert [task.version for task in registry.published()] == [1, 2]
    assert registry.find("acme/task") == second and registry.find("acme/task@1") == first
    unpack_folder(registry.archive("acme/task@2"), tmp_path / "copy")
    assert content_hash(tmp_path / "copy") == second.id
    assert [c.content_hash for c in registry.certificates(second.id)] == [second.id]


def test_unchanged_or_uncertified_content_is_refused(ledger: Ledger, folder: Path):
    registry = TaskRegistry(ledger)
    with pytest.raises(TaskError, match="has no certificate"):
        registry.publish(folder)
    certify(folder)
    registry.publish(folder)
    with pytest.raises(TaskError, match="published already as acme/task version 1"):
        registry.publish(folder)
    (folder / "instruction.md").write_text("Changed since the check.\n")
    with pytest.raises(TaskError, match="is for content"):
        registry.publish(folder)
    assert len(registry.published()) == 1


def test_a_certificate_is_stored_once_with_its_report(ledger: Ledger, folder: Path):
    registry = TaskRegistry(ledger)
    report = certify(folder)
    certificate = issue(report, load_key())
    spec = load_task(folder).spec
    for _ in range(2):
        registry.add_certificate(certificate, report.to_dict(), spec)
    assert registry.num_certificates() == 1
    assert registry.certificates(certificate.content_hash) == [certificate]


def test_unknown_names_list_what_there_is(ledger: Ledger, folder: Path):
    registry = TaskRegistry(ledger)
    with pytest.raises(TaskError, match="published: none"):
        registry.find("acme/other")
    certify(folder)
    registry.publish(folder)
    with pytest.raises(TaskError, match="it has versions 1"):
        registry.find("acme/task@7")
