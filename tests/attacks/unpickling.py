"""Malicious pickles in every file that may hold one: each would run, grow or hang, if it were believed."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.attacks.attack import Attack

PROOF = "the pickle was run"
TOP = b"\x80\x02"
MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2)


def call(module: str, name: str, *arguments: Any, protocol: int = 2) -> bytes:
    """A pickle that calls a function by its name."""
    body = pickle.dumps(arguments, protocol)[2:-1]
    return TOP + f"c{module}\n{name}\n".encode() + body + b"R."


def stacked(module: str, name: str, argument: str) -> bytes:
    """The same in protocol 4, the name put together on the stack."""
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + texts + b"\x93\x8c" + bytes([len(argument)]) + argument.encode() + b"\x85R."


def commands(proof: Path) -> dict[str, bytes]:
    """Pickles that run something which leaves a proof."""
    touch = f"touch '{proof}'"
    code = f"open({str(proof)!r}, 'w')"
    return {
        "os.system": call("os", "system", touch),
        "posix.system": call("posix", "system", touch),
        "nt.system": call("nt", "system", touch),
        "os.system in protocol 4": stacked("os", "system", f"touch {proof}"),
        "os.system by INST": b"(S" + repr(touch).encode() + b"\nios\nsystem\n.",
        "os.system by OBJ": b"(cos\nsystem\nS" + repr(touch).encode() + b"\no.",
        "os.system by NEWOBJ": TOP + b"cos\nsystem\nX" + struct.pack("<I", len(touch)) + touch.encode() + b"\x85\x81.",
        "os.system by NEWOBJ_EX": TOP + b"cos\nsystem\n(X" + struct.pack("<I", 4) + b"true" + b"t}\x92.",
        "subprocess.Popen": call("subprocess", "Popen", ["touch", str(proof)]),
        "builtins.eval": call("builtins", "eval", code),
        "builtins.exec": call("builtins", "exec", code),
        "builtins.getattr": call("builtins", "getattr", "x", "format"),
        "builtins.open": call("builtins", "open", str(proof), "w"),
        "__builtin__.eval": call("__builtin__", "eval", code),
        "builtins.__import__": call("builtins", "__import__", "antigravity"),
        "importlib.import_module": call("importlib", "import_module", "antigravity"),
        "pathlib.Path.touch": call("pathlib", "Path.touch", str(proof)),
        "runpy": call("runpy", "run_path", str(proof)),
        "torch.load": call("torch", "load", str(proof)),
        "torch.storage._load_from_bytes": call("torch.storage", "_load_from_bytes", b"x"),
        "torch.hub.load": call("torch.hub", "load", "x", "y"),
        "numpy.load": call("numpy", "load", str(proof), None, True),
        "pickle.loads": call("pickle", "loads", b"cos\nsystem\n."),
        "copyreg._reconstructor": TOP + b"ccopyreg\n_reconstructor\ncos\nsystem\ncbuiltins\nobject\nN\x87R.",
        "operator.attrgetter": call("operator", "attrgetter", "system"),
        "functools.partial": TOP + b"cfunctools\npartial\ncos\nsystem\n\x85R.",
        "a name with dots": stacked("collections", "OrderedDict.fromkeys", "x"),
        "an allowed module, another name": call("collections", "namedtuple", "x", "y"),
        "__setstate__ by BUILD": TOP + b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00stateK\x01sb0cos\nsystem\n.",
        "a default dict's factory": TOP + b"ccollections\ndefaultdict\ncos\nsystem\n\x85R.",
        "extension code 1": TOP + b"\x82\x01.",
        "extension code 2": TOP + b"\x83\x01\x00.",
        "extension code 4": TOP + b"\x84\x01\x00\x00\x00.",
        "a persistent id": TOP + b"X\x06\x00\x00\x00systemQ.",
        "an object array": pickle.dumps([__import__("numpy").array([{}], dtype=object)], 2),
    }


def bombs() -> dict[str, bytes]:
    """Pickles that grow, nest or never end."""
    laughs = b"]" + b"".join(b"q%c(" % n + b"h%c" % n * 10 + b"e0]h%ca" % n for n in range(60))
    doubled = TOP + b"N\x85" + b"".join(b"q%c0h%ch%c\x86" % (n, n, n) for n in range(100)) + b"."
    return {
        "deep lists": TOP + b"]" * 100_000 + b"a" * 99_999 + b".",
        "deep tuples": TOP + b")" + b"\x85" * 200_000 + b".",
        "deep dicts": TOP + b"}" + b"K\x00}" * 100_000 + b"s" * 100_000 + b".",
        "too many marks": TOP + b"(" * 600_000 + b".",
        "too many lists": TOP + b"(" + b"]" * 600_000 + b"l.",
        "too many dicts": TOP + b"(" + b"}" * 600_000 + b"l.",
        "shared tuples that double": doubled,
        "billion laughs": TOP + laughs + b".",
        "a list in itself": TOP + b"]q\x00h\x00a.",
        "a dict in itself": TOP + b"}q\x00K\x01h\x00s.",
        "a key that doubles": doubled[:-1] + b"q\xff0}h\xffNs.",
        "a long of 2 GB": TOP + b"\x8b\xff\xff\xff\x7f" + b"\xff" * 100,
        "a long of a negative size": TOP + b"\x8b\xff\xff\xff\xff.",
        "a long of a megabyte": TOP + b"\x8b" + struct.pack("<i", 10**6) + b"\x7f" * 10**6 + b".",
        "a number of a million digits": b"I" + b"9" * 10**6 + b"\n.",
        "a long text number": b"L" + b"9" * 10**6 + b"L\n.",
        "a text of 2**63 bytes": TOP + b"\x8d" + struct.pack("<Q", 2**63) + b"x.",
        "bytes of 2**63": TOP + b"\x8e" + struct.pack("<Q", 2**63) + b"x.",
        "a bytearray of 2**62": b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b"x.",
        "a frame of 2**63": b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"N.",
        "a line without an end": b"V" + b"x" * 10**6,
        "a memo of far numbers": TOP + b"N" + b"".join(b"r" + struct.pack("<I", n * 1000) for n in range(1, 250_000)),
        "protocol 255": b"\x80\xffN.",
        "an unknown operation": TOP + b"\xff.",
        "an empty stack": TOP + b".",
        "two values": TOP + b"NN.",
        "no end": TOP + b"N",
        "nothing": b"",
        "a list as a key": TOP + b"}]Ns.",
        "a list in a set": b"\x80\x04\x8f(]\x90.",
        "a dict in a frozen set": b"\x80\x04(}\x91.",
        "half a surrogate": TOP + b"X\x03\x00\x00\x00\xed\xa0\x80.",
        "a huge array": call("numpy", "dtype", "f8", False, True)[:-1] + b"q\x00.",
    }


def zipped(payload: bytes, **extra: bytes) -> bytes:
    """A payload as torch.save would pack it."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("archive/data.pkl", payload)
        for name, data in {"version": b"3\n", **extra}.items():
            archive.writestr(f"archive/{name}", data)
    return packed.getvalue()


def legacy(payload: bytes) -> bytes:
    """A payload as torch.save packed it before 1.6."""
    system = pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2)
    return MAGIC + pickle.dumps(1001, 2) + system + payload + pickle.dumps([], 2)


def metadata(item: bytes, value: bytes = b"") -> bytes:
    """The .metadata of a checkpoint of one tensor, whose bytes are `item`, and one value behind it."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    chunk = dcp.ChunkStorageMetadata(offsets=torch.Size((0,)), sizes=torch.Size((4,)))
    entries: dict[str, Any] = {"w": dcp.TensorStorageMetadata(dcp.TensorProperties(), torch.Size((4,)), [chunk])}
    places = {dcp.MetadataIndex("w", [0]): _StorageInfo("__0_0.distcp", 0, len(item))}
    if value:
        entries["note"] = dcp.BytesStorageMetadata()
        places[dcp.MetadataIndex("note")] = _StorageInfo("__0_0.distcp", len(item), len(value))
    return pickle.dumps(dcp.Metadata(entries, {"w": ("model", "w")}, places))


def _planted(name: str, carrier: str, files: Callable[[], dict[str, bytes]]) -> Attack:
    def plant(folder: Path) -> None:
        for file, data in files().items():
            (folder / file).write_bytes(data)

    return Attack(f"{carrier}: {name}", plant, on="foreign")


def carried(name: str, payload: bytes) -> list[Attack]:
    """One payload in every kind of file."""
    item = zipped(payload)
    return [
        _planted(name, "zip", lambda: {"pytorch_model.bin": zipped(payload)}),
        _planted(name, "legacy", lambda: {"pytorch_model.bin": legacy(payload)}),
        _planted(name, "metadata", lambda: {".metadata": payload}),
        _planted(name, "distcp", lambda: {".metadata": metadata(item), "__0_0.distcp": item}),
    ]
