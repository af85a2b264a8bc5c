"""What an attacker can do to a checkpoint: change any byte, and make every digest fit again."""

import json
import struct

import holdfast
from holdfast.core.errors import Damaged
from holdfast.format import strictjson
from holdfast.format.digest import digest_hex

MODEL = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
OUTSIDE = "outside.safetensors"


def examine(path):
    """Do all that a reader may do with a checkpoint; damage that is only reported is raised too."""
    checkpoint = holdfast.open(path)
    for key in checkpoint.keys():
        checkpoint.read(key)
    for name in checkpoint.state:
        checkpoint.value(name)
    report = checkpoint.verify()
    if not report.good:
        raise Damaged(report.damage[0].problem)


def forge_manifest(folder, change):
    """Change the manifest's fields and sign it again."""
    path = folder / "holdfast.json"
    fields = json.loads(path.read_bytes())
    del fields["digest"]
    change(fields)
    fields["digest"] = digest_hex(strictjson.dumps(fields))
    path.write_bytes(strictjson.dumps(fields) + b"\n")


def forge_file(folder, name, data):
    """Write a file and record it in the manifest with digests that fit; a tensor file without its header's."""
    (folder / name).write_bytes(data)
    record = {"size": len(data), "blocks": [[0, len(data), digest_hex(data)]] if data else []}
    forge_manifest(folder, lambda fields: fields["files"].update({name: record}))


def tensor_file(fields, data=b""):
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(begin, end, shape=None):
    return {"dtype": "U8", "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def index(weight_map):
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()
