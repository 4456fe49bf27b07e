"""Certificates: signed, bound to the content, trusted by key; archives; content hashes."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sandbox.check.archive import pack_folder, unpack_folder
from sandbox.check.certificate import (
    Certificate,
    issue,
    problem_of,
    read_certificate,
    require_certificate,
    write_certificate,
)
from sandbox.check.findings import CheckReport, Step
from sandbox.check.keys import config_dir, load_key, public_hex, trusted_keys
from sandbox.check.subject import content_hash
from sandbox.errors import SandboxError, TaskError
from sandbox.templates.new import write_task


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration folder of this test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_task(tmp_path / "task", "acme/task", "python")


def certify(folder: Path, key: Ed25519PrivateKey | None = None) -> Certificate:
    """As a passed check would."""
    step = Step("oracle")
    report = CheckReport(str(folder), "acme/task", "1", content_hash(folder), steps=[step])
    report.flake = {"repeat": 5}
    return issue(report, key or load_key())


def test_a_certificate_holds_until_the_content_changes(folder: Path):
    """A changed byte, a new file and an executable bit all end it; .parl and caches do not."""
    write_certificate(folder, certify(folder))
    assert require_certificate(folder) == read_certificate(folder)
    (folder / "tools" / "__pycache__").mkdir()
    (folder / "tools" / "__pycache__" / "tools.pyc").write_bytes(b"x")
    require_certificate(folder)
    (folder / "solution" / "solve.sh").chmod(0o644)
    with pytest.raises(TaskError, match=r"is for content .* run `parl task check"):
        require_certificate(folder)
    (folder / "solution" / "solve.sh").chmod(0o755)
    require_certificate(folder)
    (folder / "instruction.md").write_text("Do something else.\n")
    with pytest.raises(TaskError, match=r"is for content"):
        require_certificate(folder)


def test_without_a_certificate_the_message_says_what_to_do(folder: Path):
    with pytest.raises(TaskError, match=r"has no certificate.*parl task check.*allow_uncertified"):
        require_certificate(folder)


@pytest.mark.parametrize("field", ["name", "created_at", "results", "content_hash", "suggestions"])
def test_a_changed_field_breaks_the_signature(folder: Path, field: str):
    """Everything but the signature is signed."""
    certificate = certify(folder)
    changed = {
        "name": "acme/other",
        "created_at": 0.0,
        "results": {},
        "content_hash": "0" * 64,
        "suggestions": {"min_tokens": 1},
    }
    forged = replace(certificate, **{field: changed[field]})
    assert "changed after it was signed" in str(problem_of(forged, forged.content_hash))


def test_a_stranger_s_key_counts_once_it_is_trusted(folder: Path):
    """Certificates travel: another user's counts when the key is listed."""
    stranger = Ed25519PrivateKey.generate()
    certificate = certify(folder, stranger)
    digest = content_hash(folder)
    assert "not trusted here" in str(problem_of(certificate, digest))
    config_dir().mkdir(parents=True)
    (config_dir() / "trusted_keys").write_text(f"# a colleague\n{public_hex(stranger)}  # hers\n")
    assert problem_of(certificate, digest) is None
    (config_dir() / "trusted_keys").write_text("no key\n")
    with pytest.raises(TaskError, match=r"trusted_keys:1.*64 hex digits"):
        trusted_keys()


def test_a_failed_check_is_not_certified(folder: Path):
    step = Step("nop")
    step.add("passing-nop", "tests/", "doing nothing passes")
    report = CheckReport(str(folder), "acme/task", "1", content_hash(folder), steps=[step])
    with pytest.raises(TaskError, match=r"the check failed .passing-nop"):
        issue(report, load_key())


def test_too_few_episodes_are_not_certified(folder: Path):
    """The library refuses them too, and does not accept who signed some anyway."""
    report = CheckReport(str(folder), "acme/task", "1", content_hash(folder), steps=[Step("nop")])
    for flake in ({}, {"repeat": 4, "trials": 40}, {"trials": 8}):
        report.flake = flake
        with pytest.raises(TaskError, match=r"not certified: --repeat .* plays too few episodes"):
            issue(report, load_key())
    report.flake = {"trials": 10}  # as version 2 told it
    old = issue(report, load_key())
    assert problem_of(old, old.content_hash) is None
    few = replace(old, flake={"trials": 4}, signature="")
    signed = replace(few, signature=load_key().sign(few.message()).hex())
    assert "rests on too little" in str(problem_of(signed, signed.content_hash))


def test_the_key_is_made_once_and_only_for_the_user(folder: Path):
    """Mode 0600; a key that others can read is refused."""
    path = config_dir() / "signing_key"
    with pytest.raises(SandboxError, match=r"no signing key"):
        load_key(create=False)
    first = public_hex(load_key())
    assert public_hex(load_key()) == first and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(SandboxError, match=r"can be read by other users"):
        load_key()
    path.chmod(0o600)
    path.write_text("zz")
    with pytest.raises(SandboxError, match=r"is not a signing key"):
        load_key()


def test_a_file_that_is_no_certificate_is_one_clear_line(folder: Path):
    certificate = certify(folder)
    path = write_certificate(folder, certificate)
    path.write_text("{}")
    with pytest.raises(TaskError, match=r"is no certificate"):
        require_certificate(folder)
    path.write_text(json.dumps({**asdict(certificate), "format": "other"}))
    with pytest.raises(TaskError, match=r"is of format 'other'"):
        require_certificate(folder)


def test_an_archive_is_deterministic_and_comes_back_equal(folder: Path, tmp_path: Path):
    """The certificate goes along and still holds."""
    write_certificate(folder, certify(folder))
    archive = pack_folder(folder)
    (folder / "task.toml").touch()
    assert pack_folder(folder) == archive
    unpack_folder(archive, tmp_path / "copy")
    assert content_hash(tmp_path / "copy") == content_hash(folder)
    require_certificate(tmp_path / "copy")
    with pytest.raises(TaskError, match=r"exists already"):
        unpack_folder(archive, tmp_path / "copy")


@pytest.mark.parametrize("kind", ["up", "absolute", "link"])
def test_an_archive_cannot_write_elsewhere(kind: str, tmp_path: Path):
    """Entries that leave the folder and links are refused before anything is written."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        names = {"up": "../evil", "absolute": "/tmp/evil", "link": "evil"}
        entry = tarfile.TarInfo(names[kind])
        if kind == "link":
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(entry)
    with pytest.raises(TaskError, match=r"no plain file"):
        unpack_folder(buffer.getvalue(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_are_not_published(folder: Path):
    (folder / "environment" / "link").symlink_to("/etc/hostname")
    with pytest.raises(TaskError, match=r"is a link"):
        pack_folder(folder)
