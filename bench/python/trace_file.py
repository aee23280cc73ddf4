"""Writes trace files: safetensors, byte for byte the same for the same content."""

import json

import numpy as np

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16"}


def save(path, spec, tensors):
    """Writes `tensors`, numpy arrays by name, and `spec` to `path`."""
    header, blobs, end = {}, [], 0
    metadata = {"format": "meshstep-trace", "version": "1", "spec": json.dumps(spec, allow_nan=False)}
    header["__metadata__"] = metadata
    # The widest types first, so that every tensor is aligned.
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        array = tensors[name]
        blobs.append(array.astype(array.dtype.newbyteorder("<")).tobytes())
        begin, end = end, end + len(blobs[-1])
        dtype = DTYPES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + b"".join(blobs))
