"""GPU kernels in C on the CPU, for tests: one fiber for each thread of a block, blocks one after the other.

Kernels are compiled by g++ as they stand, with what CUDA or Metal would declare before them. What goes
wrong on a device without a word is noticed here: barriers that the threads of a block do not reach together
raise, shared memory holds NaN and -1 at the start of each block, and threads run in turn forwards and
backwards, so that what lacks a barrier gives other results. What it cannot show is speed, and how a GPU's
compiler reads the source.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..needs import need_program

SHIM = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <utility>

struct uint3 { unsigned x, y, z; };
static uint3 threadIdx, blockIdx;
static ucontext_t scheduler, fibers[1024];
static int reached[1024];  // the line of the barrier where a thread waits; 0: it has ended
static int running;
static char stacks[1024][1 << 15];
static void (*entry)(void*);
static void* entry_arguments;
#define ON_CHIP static __attribute__((section("on_chip"), used))
ON_CHIP int nothing;  // so that there is such a section
extern char __start_on_chip[], __stop_on_chip[];

static void wait_at(int line) {
    reached[running] = line;
    swapcontext(&fibers[running], &scheduler);
}

static void begin() {
    entry(entry_arguments);
    reached[running] = 0;
    swapcontext(&fibers[running], &scheduler);
}

static int run_block(int threads) {
    memset(__start_on_chip, 0xff, __stop_on_chip - __start_on_chip);
    for (int t = 0; t < threads; ++t) {
        getcontext(&fibers[t]);
        fibers[t].uc_stack.ss_sp = stacks[t];
        fibers[t].uc_stack.ss_size = sizeof stacks[t];
        fibers[t].uc_link = &scheduler;
        makecontext(&fibers[t], begin, 0);
    }
    for (bool backwards = false;; backwards = !backwards) {
        for (int i = 0; i < threads; ++i) {
            running = backwards ? threads - 1 - i : i;
            threadIdx = {unsigned(running), 0, 0};
            swapcontext(&scheduler, &fibers[running]);
        }
        for (int t = 1; t < threads; ++t) if (reached[t] != reached[0]) return 1;
        if (!reached[0]) return 0;
    }
}

template <class... A> struct Launcher {
    void (*kernel)(A...);
    void** values;
    template <size_t... I> void call(std::index_sequence<I...>) { kernel(*(A*)values[I]...); }
    static void enter(void* self) { ((Launcher*)self)->call(std::index_sequence_for<A...>()); }
};

template <class... A> int run(void (*kernel)(A...), int columns, int rows, int threads, void** values) {
    Launcher<A...> launcher{kernel, values};
    entry = Launcher<A...>::enter;
    entry_arguments = &launcher;
    for (int y = 0; y < rows; ++y) for (int x = 0; x < columns; ++x) {
        blockIdx = {unsigned(x), unsigned(y), 0};
        if (run_block(threads)) return 1;
    }
    return 0;
}

static float from_bits(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static unsigned to_bits(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
"""
CUDA = r"""
#define __global__
#define __device__
#define __shared__ ON_CHIP
#define __syncthreads() wait_at(__LINE__)
#define __uint_as_float from_bits
#define __float_as_uint to_bits
static void converted(float& y, unsigned short bits) { _Float16 x; memcpy(&x, &bits, 2); y = x; }
static void converted(unsigned short& bits, float y) { _Float16 x = y; memcpy(&bits, &x, 2); }
#define asm(...) converted(y, x)
"""
"""asm: the instructions that convert F16."""
MLX_TYPES = r"""
typedef _Float16 float16_t;
struct bfloat16_t {
    uint16_t bits;
    explicit bfloat16_t(float x) : bits((to_bits(x) + 0x7fff + (to_bits(x) >> 16 & 1)) >> 16) {}
    operator float() const { return from_bits(unsigned(bits) << 16); }
};
"""
METAL = r"""
#define threadgroup ON_CHIP
#define threadgroup_barrier(flags) wait_at(__LINE__)
#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
namespace metal { using ::wait_at; using std::exp; }
"""


@functools.cache
def _library(source: str) -> ctypes.CDLL:
    if sys.platform != "linux":
        pytest.skip("kernels are emulated on Linux")
    compiler = need_program("g++")
    folder = Path(_folder().name)
    file = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:24]}.cpp"
    file.write_text(source)
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-o", str(file.with_suffix(".so")), str(file)]
    done = subprocess.run([compiler, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(file.with_suffix(".so")))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kernels")


class Kernels:
    """The kernels of a source by name; ``prologue`` is what the language declares."""

    def __init__(self, code: str, names: Sequence[str], prologue: str = CUDA) -> None:
        launchers = [
            f'extern "C" int launch_{name}(int columns, int rows, int threads, void** values) '
            f"{{ return run({name}, columns, rows, threads, values); }}\n"
            for name in names
        ]
        self.library = _library(SHIM + prologue + code + "".join(launchers))

    def launch(self, name: str, grid: Sequence[int], threads: int, values: Sequence[Any]) -> None:
        """``values``: NumPy scalars, and the addresses of arrays as int."""
        held = [np.int64(value) if isinstance(value, int) else value for value in values]
        boxes = [np.array([value]) for value in held]
        pointers = (ctypes.c_void_p * len(boxes))(*(box.ctypes.data for box in boxes))
        failed = getattr(self.library, f"launch_{name}")(grid[0], grid[1], threads, pointers)
        assert not failed, f"{name}: the threads of a block wait at different barriers"


def mlx_kernel(language: str) -> Callable[..., Any]:
    """``mx.fast.metal_kernel`` or ``mx.fast.cuda_kernel``: their arguments and signatures."""
    import mlx.core as mx

    types = {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.int32: "int"}

    def make(
        name: str, input_names: list[str], output_names: list[str], source: str, header: str = "",
        ensure_row_contiguous: bool = True,
    ) -> Any:  # fmt: skip
        assert not ensure_row_contiguous

        def call(
            *, inputs: list[Any], template: list[tuple[str, Any]], grid: Any, threadgroup: Any,
            output_shapes: list[Any], output_dtypes: list[Any], stream: Any,
        ) -> list[Any]:  # fmt: skip
            mx.eval(*inputs)
            parameters, values, kept = [], [], []
            for given, array in zip(input_names, inputs, strict=True):
                host = np.asarray(mx.view(array, mx.uint16) if array.dtype == mx.bfloat16 else array)
                strides = np.array([step // host.itemsize for step in host.strides], np.int64)
                kept += [host, strides]
                parameters.append(f"const {types[array.dtype]}* {given}")
                values.append(host.ctypes.data)
                if f"{given}_strides" in source:
                    parameters.append(f"const int64_t* {given}_strides")
                    values.append(strides.ctypes.data)
            outs = []
            for given, shape, dtype in zip(output_names, output_shapes, output_dtypes, strict=True):
                outs.append(np.full(shape, 0xA5, np.dtype(f"V{dtype.size}").str.replace("V", "u")))
                parameters.append(f"{types[dtype]}* {given}")
                values.append(outs[-1].ctypes.data)
            typed = "".join(f"using {key} = {types[value]};\n" for key, value in template)
            function = f"void {name}({', '.join(parameters)}) {{\n{typed}{source}\n}}\n"
            kernels = Kernels(header + function, [name], MLX_TYPES + (CUDA if language == "cuda" else METAL))
            threads = threadgroup[0]
            assert threadgroup[1:] == (1, 1)
            assert grid[0] % threads == 0
            kernels.launch(name, (grid[0] // threads, grid[1]), threads, values)
            return [mx.view(mx.array(out), dtype) for out, dtype in zip(outs, output_dtypes, strict=True)]

        return call

    return make


def names_of(code: str) -> list[str]:
    """The kernels of a source in CUDA C."""
    return re.findall(r"__global__ void (\w+)", code)
