#!/usr/bin/env python3
"""Write a GGUF again with all weights as F32.

Why: llama.cpp multiplies quantised weights by activations that it rounds to 8 bits. The slightest numerical difference
(a micro-batch of another size, another attention kernel, the same f16 cache) flips some of those roundings, and on
SmolLM2-135M that alone is a KL divergence of about 0.004 - more than an FP4 cache costs. With F32 weights the
divergence measured is the cache's.

usage: dequantize_gguf.py IN.gguf OUT.gguf
"""

from __future__ import annotations

import argparse

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    args = parser.parse_args()

    reader = GGUFReader(args.source)
    writer = GGUFWriter(args.target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub = field.types[1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
    writer.add_file_type(0)
    for tensor in reader.tensors:
        data = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
