"""Every call of softgpu's runtime and driver with null pointers: an error, as CUDA gives, and no crash."""

import ctypes
import faulthandler
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clang import cindex  # type: ignore[import-untyped]

import jitckpt

LIBRARIES = Path(jitckpt.__file__).parent / "lib"

# What CUDA takes a null pointer for as well: nothing to free, nothing wanted.
MAY_SUCCEED = {
    "cudaFree",
    "cudaFreeHost",
    "cudaDeviceGetStreamPriorityRange",
    "cudaMemGetInfo",
    "cudaStreamGetCaptureInfo",
    "cudaGetDriverEntryPointByVersion",
    "cuMemGetInfo_v2",
}
END_PROCESS = ("cudaDeviceReset", "cuDevicePrimaryCtxReset", "cudaProfiler", "cuProfiler")


def includes() -> list[str]:
    wheels = Path(sysconfig.get_paths()["purelib"]) / "nvidia"  # torch's
    return [str(folder) for folder in sorted(wheels.glob("*/include"))]


def functions_in(cursor: Any) -> Iterator[Any]:
    for child in cursor.get_children():
        if child.kind == cindex.CursorKind.FUNCTION_DECL and not child.is_definition():
            yield child
        elif child.kind in (cindex.CursorKind.LINKAGE_SPEC, cindex.CursorKind.UNEXPOSED_DECL):
            yield from functions_in(child)


def calls_of(library: str, header: str, prefix: str) -> list[tuple[str, list[str]]]:
    """Return the functions of a library that the header declares, with their arguments' types."""
    source = f"#include <{header}>\n#include <cstddef>\n"
    arguments = ["-x", "c++", "-std=c++20", *(f"-isystem{folder}" for folder in includes())]
    index = cindex.Index.create()
    unit = index.parse("calls.cpp", args=arguments, unsaved_files=[("calls.cpp", source)])
    ctypes.CDLL(str(LIBRARIES / "libsoftgpu.so"), mode=ctypes.RTLD_GLOBAL)  # where the driver finds it
    loaded = ctypes.CDLL(str(LIBRARIES / library))
    calls = []
    for function in functions_in(unit.cursor):
        name = function.spelling
        if name.startswith(prefix) and not name.startswith(END_PROCESS) and hasattr(loaded, name):
            types = [argument.type.get_canonical() for argument in function.get_arguments()]
            calls.append((name, [kind_of(one) for one in types]))
    assert len(calls) > 100
    return calls


def kind_of(type_: Any) -> str:
    if type_.kind == cindex.TypeKind.POINTER:
        pointee = type_.get_pointee()
        of_structure = pointee.kind == cindex.TypeKind.RECORD and pointee.get_size() < 0  # a handle
        if of_structure:
            return "handle"
        plain = pointee.kind in (cindex.TypeKind.VOID, cindex.TypeKind.FUNCTIONPROTO)
        return "in" if pointee.is_const_qualified() or plain else "out"
    return "number" if type_.kind != cindex.TypeKind.RECORD else "structure"


# A handle is a pointer, too, but null is one of its values.
def tried(calls: list[tuple[str, list[str]]], library: str) -> Iterator[tuple[str, int, int | None]]:
    """Make each call with all pointers null, then with each that is for a result; yields what it returns.

    That is None where the process has not survived it: then another one goes on.
    """
    todo = [
        (name, kinds, null)
        for name, kinds in calls
        if "structure" not in kinds
        for null in (-1, *(place for place, kind in enumerate(kinds) if kind == "out"))
    ]
    done = 0
    while done < len(todo):
        here, there = os.pipe()
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            loaded = ctypes.CDLL(str(LIBRARIES / library))
            if hasattr(loaded, "cuInit"):
                loaded.cuInit(0)
            memory = [ctypes.create_string_buffer(1 << 16) for _ in range(16)]
            for name, kinds, null in todo[done:]:
                arguments = [
                    ctypes.addressof(memory[place])
                    if kind in ("in", "out") and null not in (-1, place)
                    else 0  # of handles: the default stream
                    for place, kind in enumerate(kinds)
                ]
                os.write(
                    there,
                    (getattr(loaded, name)(*map(ctypes.c_size_t, arguments)) & 0xFFFFFFFF).to_bytes(
                        4, "little"
                    ),
                )
            os._exit(0)
        os.close(there)
        with os.fdopen(here, "rb") as results:
            while result := results.read(4):
                yield todo[done][0], todo[done][2], int.from_bytes(result, "little")
                done += 1
        if os.waitpid(child, 0)[1] != 0:
            yield todo[done][0], todo[done][2], None
            done += 1


@pytest.mark.parametrize(
    ("library", "header", "prefix"),
    [("libsoftgpu.so", "cuda_runtime_api.h", "cuda"), ("driver/libcuda.so.1", "cuda.h", "cu")],
)
def test_null_pointers_are_errors(library: str, header: str, prefix: str) -> None:
    wrong = []
    for name, null, result in tried(calls_of(library, header, prefix), library):
        if result is None or (null >= 0 and result == 0 and name not in MAY_SUCCEED):
            wrong.append(f"{name} with argument {null} null: {'died' if result is None else 'succeeded'}")
    assert not wrong, "\n".join(wrong)
