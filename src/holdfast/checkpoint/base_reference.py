"""The base model of adapters by reference: the files of its folder as sizes and digests, and the check of a folder.

The files of a Hugging Face cache are named by their content, and a Holdfast checkpoint has its manifest: neither is
read whole. Files of any other folder are digested on threads, once in a process as long as they do not change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.core import names
from holdfast.core.errors import Mismatch, NotFound
from holdfast.core.threads import run_on_threads
from holdfast.format.digest import Digest, digest_hex
from holdfast.format.manifest import decode_manifest

_BUFFER_BYTES = 4 << 20
_THREADS = 8
_BLOB = "blob:"  # the name of a file in a Hugging Face cache, which is the hub's digest of its content
_ENDINGS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_DIGESTS: dict[tuple[Any, ...], str] = {}  # by real path, size, time of the last change and inode


def base_files(folder: Path) -> dict[str, list[Any]]:
    """Return size and digest of the files of a base model; a digest is "" where another file's digest covers it."""
    manifest = folder / names.MANIFEST
    if manifest.is_file():
        data = manifest.read_bytes()
        recorded = decode_manifest(data, str(folder)).files
        sizes = {name: [record.size, ""] for name, record in recorded.items() if names.is_tensor_file(name)}
        return {names.MANIFEST: [len(data), digest_hex(data)], **sizes}
    found = sorted(path for path in folder.iterdir() if path.is_file() and _is_weights(path.name))
    digests: dict[str, str] = {}

    def digest(paths: Iterator[Path]) -> None:
        for path in paths:
            digests[path.name] = _digest(path)

    if found:
        run_on_threads(min(_THREADS, len(found)), "holdfast-digest", iter(found), digest)
    return {path.name: [path.stat().st_size, digests[path.name]] for path in found}


def _is_weights(name: str) -> bool:
    return name == "config.json" or (name.endswith(_ENDINGS) and name != names.ADAPTER_FILE)


def _digest(path: Path) -> str:
    blobs = path.resolve().parent
    if path.is_symlink() and blobs.name == "blobs":
        return _BLOB + path.resolve().name
    stat = path.stat()
    known = (str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino)
    if known not in _DIGESTS:
        digest, buffer = Digest(), bytearray(_BUFFER_BYTES)
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                digest.update(memoryview(buffer)[:size])
        _DIGESTS[known] = digest.hexdigest()
    return _DIGESTS[known]


def hub_snapshot(repository: str, revision: str | None) -> Path | None:
    """Return the folder of a repository's revision in the Hugging Face cache of this host, None if it is not there."""
    if not revision or repository.count("/") > 1 or revision != os.path.basename(revision):  # noqa: PTH119
        return None
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    folder = cache / f"models--{repository.replace('/', '--')}" / "snapshots" / revision
    return folder if folder.is_dir() else None


def references(bases: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each base model that a checkpoint refers to, for people."""
    for name, record in bases.items():
        if record["mode"] == "reference":
            revision = f" at revision {record['revision']}" if record.get("revision") else ""
            quantized = f", quantized in memory as {', '.join(record['quantized'])}" if record.get("quantized") else ""
            yield f"the base model of {name}, {record['source']}{revision}{quantized}"


def base_folder(source: str, revision: str | None) -> Path | None:
    """Return the folder of a base model on this host, by its path, or by repository and revision; None without one."""
    if not source:
        return None
    path = Path(source)
    return path if path.is_dir() else hub_snapshot(source, revision)


def find_base(record: Mapping[str, Any], live: Path | None, where: str) -> Path:
    """Return the folder to compare with a recorded base: the one that the live model came from, or the recorded one."""
    folder = live or base_folder(record["source"], record.get("revision"))
    if folder is None:
        revision = f" at revision {record['revision']}" if record.get("revision") else ""
        raise NotFound(
            f"{where}: its base model {record['source']}{revision} is missing on this host, so the live base cannot be "
            "compared with it; make it available, or pass strict=False to load the adapters without the comparison"
        )
    return folder


def check_base(record: Mapping[str, Any], folder: Path, where: str, *, digests: bool = True) -> None:
    """Raise Mismatch if the files in a folder are not those that were recorded. `digests=False` compares sizes."""
    way_out = "load the base that the adapters were trained on, or pass strict=False to load them onto this one"
    for name, (size, _) in record["files"].items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            found = "is missing" if actual is None else f"has {actual} bytes"
            raise Mismatch(f"{where}: its base model changed: {path} {found}, {size} were recorded; {way_out}")
    found_files = base_files(folder) if digests else {}
    for name, (_, digest) in record["files"].items():
        actual_digest = found_files.get(name, (0, digest))[1]
        if digest and not _same(digest, actual_digest):
            raise Mismatch(
                f"{where}: its base model changed: the digest of {folder / name} is {actual_digest}, {digest} was "
                f"recorded; {way_out}"
            )


def _same(recorded: str, found: str) -> bool:
    """Compare digests; those of a cache and of a folder are of different kinds and say nothing about each other."""
    return recorded == found or recorded.startswith(_BLOB) != found.startswith(_BLOB)
