"""Kernels that the interpreter runs must also compile: for compute capability 9.0, on any machine."""

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = '''
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from magi_triton.runtime.configs import _HOPPER
from magi_triton.forgetting_attention import kernel as forget
from magi_triton.sage_attention import kernel as sage

FLOATS = ("scale", "threshold")
POINTERS = dict.fromkeys(["q", "k", "v", "out", "dout", "dq", "dk", "dv"], "*bf16")
POINTERS |= dict.fromkeys(["c", "lse", "delta", "dc_row", "dc_col", "q_scales", "k_scales"], "*fp32")
POINTERS["starts"] = "*i64"

def shared(kernel, tile, pointers, **constants):
    """Shared memory of a kernel in bytes."""
    constants |= dict(BLOCK_M=tile.block_m, BLOCK_N=tile.block_n)
    signature, attributes, values = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        elif name in pointers:
            signature[name], attributes[(i,)] = pointers[name], [["tt.divisibility", 16]]
        elif name.startswith("st_"):
            signature[name] = ("i32",) * (4 if name == "st_mask" else 3)
            attributes |= {(i, j): [["tt.divisibility", 16]] for j in range(len(signature[name]))}
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    source = ASTSource(kernel, signature, values, attributes)
    options = dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared

dim = int(sys.argv[1])
size = dict(HEAD_DIM=dim, BLOCK_D=dim)
found = {}
for name, more in (("fwd", dict(PRUNE=True)), ("dkdv", {}), ("dq", {})):
    kernel = getattr(forget, f"forget_{name}_kernel")
    found[name] = shared(kernel, _HOPPER[f"forget_{name}"][dim], POINTERS, HAS_START=True, **size, **more)
for mask in (0, 1):
    pointers = POINTERS | dict(q="*i8", k="*i8", mask="*i8")
    options = dict(BLKQ=128, BLKK=64, CAUSAL=True, MASK=mask)
    found[f"sage{mask}"] = shared(sage.sage_fwd_kernel, _HOPPER["sage"][dim], pointers, **size, **options)
print(max(found.values()))
'''


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_compiles_and_fits_shared_memory(head_dim):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", PROGRAM, str(head_dim)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) <= 227 * 1024
