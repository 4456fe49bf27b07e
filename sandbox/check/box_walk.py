"""Every file that an agent can read in its box, as text: also what is packed, and data bases."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

MAX_FILE_BYTES = 1 << 20
"""Of each file that is searched, in the task's folder and in the box."""
MAX_BOX_CHARS = 4_000_000


def walk_code() -> str:
    """The program that runs in the box; ``walked`` reads what it prints."""
    return _WALK.replace("{most}", str(MAX_FILE_BYTES)).replace("{total}", str(MAX_BOX_CHARS))


def walked(text: str) -> dict[str, Any]:
    """``files`` (name -> text), ``environ``, ``cut`` (examples of what was left), ``num_cut``.
    ValueError for anything else."""
    try:
        return json.loads(zlib.decompress(base64.b64decode(text.strip(), validate=True)))
    except zlib.error as error:
        raise ValueError(str(error)) from error


_WALK = """
import base64, binascii, gzip, io, json, os, re, zipfile, zlib
from urllib.parse import quote
try:
    import sqlite3
except ImportError:  # a Python built without it; its files are read as they stand
    sqlite3 = None
here = os.getcwd()
most, most_of_all, most_sent = {most}, {total}, 1040000


def tables(path):
    # every row as a line, and whether some were left out; None for what no agent can open either
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        lines, left = [], most
        try:
            base = sqlite3.connect("file:" + quote(path) + "?" + mode, uri=True, timeout=1)
            base.text_factory = lambda raw: raw.decode("utf-8", "replace")
            try:
                for name, sql in base.execute(
                        "select name, sql from sqlite_master where type in ('table', 'view')"
                        ).fetchall():
                    lines.append(str(sql))
                    for row in base.execute('select * from "' + name.replace('"', '""') + '"'):
                        cells = [cell.decode("utf-8", "replace") if isinstance(cell, bytes)
                                 else str(cell) for cell in row]
                        lines.append(" | ".join(cells)[:left])
                        left -= len(lines[-1]) + 1
                        if left <= 0:
                            break
            finally:
                base.close()
            return "\\n".join(lines), left <= 0
        except sqlite3.Error:  # a journal that needs to be written, or no data base
            continue
    return None


def unpacked(content):
    try:
        if content[:2] == b"\\x1f\\x8b":
            return [(" (gzip)", gzip.GzipFile(fileobj=io.BytesIO(content)).read(most + 1))]
        if content[:2] == b"PK":
            archive = zipfile.ZipFile(io.BytesIO(content))
            return [(" (zip): " + name, archive.open(name).read(most + 1))
                    for name in archive.namelist()[:50] if not name.endswith("/")]
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError,
            NotImplementedError, ValueError):  # damaged or locked: no agent opens it either
        return []
    parts = []
    joined = re.sub(rb"(?<=[A-Za-z0-9+/])\\r?\\n(?=[A-Za-z0-9+/=])", b"", content[:200000])
    for coded in re.findall(rb"[A-Za-z0-9+/]{12,}={0,2}", joined)[:50]:
        try:
            plain = base64.b64decode(coded, validate=True)
            plain.decode()
        except (binascii.Error, UnicodeDecodeError):  # no base64 text; it is read as it stands
            continue
        parts.append((" (base64 %d)" % len(parts), plain))
    return parts


system = {"proc", "sys", "dev", "usr", "bin", "lib", "lib64", "lib32", "sbin", "etc", "tmp", "run",
          ".parl", ".parl-seed"}
roots = [here] + ["/" + name for name in os.listdir("/") if name not in system]
found, seen, total, cut = {}, set(), 0, []
for root in roots:
    if not os.path.isdir(root):
        continue
    for folder, folders, names in os.walk(root):
        folders.sort()
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        if "/site-packages" in folder or "/lib/python" in folder:
            folders.clear()
            continue
        for name in sorted(names):
            path = os.path.join(folder, name)
            shown = os.path.relpath(path, here) if path.startswith(here) else path
            if len(found) > 400 or not os.path.isfile(path):
                cut += [shown] if os.path.isfile(path) else []
                continue
            try:
                with open(path, "rb") as file:
                    content = file.read(most + 1)
            except OSError:  # the agent has the same user and cannot read it either
                continue
            rows = None
            if sqlite3 and content[:15] == b"SQLite format 3":
                rows = tables(path)
            parts = [("", content), *unpacked(content)]
            if rows:  # the file itself says little more
                parts = [("", content[:20000]), (" (sqlite)", rows[0].encode())]
                cut += [shown] if rows[1] else []
            for inner, part in parts:
                text = part[:most].decode("utf-8", "replace")
                if total + len(text) < most_of_all:
                    found[shown + inner] = text
                    total += len(text)
                if len(part) > most or shown + inner not in found:
                    cut.append(shown + inner)


def sent():
    return base64.b64encode(zlib.compress(json.dumps(
        {"files": found, "environ": dict(os.environ), "cut": cut[:5], "num_cut": len(cut)}
    ).encode())).decode()


text = sent()
while len(text) > most_sent and found:  # what does not shrink: the largest are no texts
    size = {name: len(zlib.compress(inner.encode())) for name, inner in found.items()}
    over = (len(text) - most_sent) * 3 / 4 + 1
    while over > 0 and found:
        largest = max(found, key=size.get)
        over -= size[largest]
        del found[largest]
        cut.append(largest)
    text = sent()
print(text)
"""
