"""Writes the tests' cuBLAS that says what it is called with, and what calls it, from calls.toml.

CMake runs it: generate_blas.py --calls calls.toml --include DIR... --output DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "device_api"))

from generate import DO_NOT_EDIT, command, definition, write_files
from generate_proxy import Carried, Field, bare, read_table

# These have something to remember: blas_echo.cpp has them.
BY_HAND = {"cublasSetPointerMode_v2", "cublasLtMatmulDescCreate", "cublasLtMatmulDescSetAttribute"}
DRAWN = {
    "cublasHandle_t": "driver.blas()",
    "cublasLtHandle_t": "driver.light()",
    "cublasLtMatmulDesc_t": "driver.description()",
    "cublasLtMatrixLayout_t": "driver.layout()",
    "cublasLtMatmulPreference_t": "driver.preference()",
    "cudaStream_t": "cudaStream_t{nullptr}",
}


def is_beta(field: Field) -> str:
    return "true" if field.name == "beta" else "false"


def number(call: Carried, field: Field) -> str:
    """How the echo reads alpha or beta."""
    types = {argument.type: argument.name for argument in call.prototype.arguments}
    if description := types.get("cublasLtMatmulDesc_t"):
        return f"echo::number({description}, {field.name}, {is_beta(field)})"
    if field.pointee == "void":
        return f"echo::number(handle, {field.name}, computeType, Ctype)"
    return f"echo::number(handle, {field.name}, sizeof *{field.name})"


def echoed(call: Carried, field: Field) -> str:
    name = field.name
    if bare(field.argument.type) == "cudaStream_t":
        return f"line.stream({name});"
    if field.kind == "result":
        return (
            f"if (echo::number(handle, {name}, 0).on_device) line.pointer({name}); "
            f"else line.invent({name}, {size_of_result(field)});"
        )
    return {
        "handle": f"line.thing({name});",
        "destroys": f"line.thing({name});",
        "value": f"line.value({name});",
        "pointer": f"line.pointer({name});",
        "scalar": f"line.number({number(call, field)});",
        "bytes": f"line.bytes({name}, sizeInBytes);",
        "in": f"line.bytes({name}, sizeof *{name});",
        "out": f"line.invent({name});",
        "makes": f"*{name} = reinterpret_cast<{field.pointee}>(echo::make());",
    }[field.kind]


def size_of_result(field: Field) -> str:
    return "echo::bytes_of(resultType)" if field.pointee == "void" else f"sizeof *{field.name}"


def echo(call: Carried) -> str:
    body = [f'echo::Line line("{call.name}");', *(echoed(call, field) for field in call.fields)]
    body += [f"echo::end({call.destroys});"] if call.destroys else []
    return definition(call.prototype.declaration(), [*body, "return CUBLAS_STATUS_SUCCESS;"])


def drawn(field: Field) -> str:
    kind, type_name, name = field.kind, field.argument.type, field.name
    return {
        "handle": f"const auto {name} = {DRAWN.get(bare(type_name), '')};",
        "value": f"const auto {name} = driver.draw<{type_name}>();",
        "pointer": f"const auto {name} = static_cast<{type_name}>(driver.address());",
        "in": f"const auto* const {name} = driver.structure<{field.pointee}>();",
        "out": f"{field.pointee} {name}_value{{}};\n  {field.pointee}* const {name} = &{name}_value;",
        "bytes": f"const auto {name}_content = driver.content();\n"
        f"  const void* const {name} = {name}_content.data();\n"
        f"  const size_t sizeInBytes = {name}_content.size();",
    }[kind]


def drive(call: Carried) -> str:
    """A function that draws the arguments, makes the call, and notes what comes back."""
    lengths = {"sizeInBytes"} if call.of_kind("bytes") else set()
    body = []
    for field in call.fields:
        if field.kind in ("scalar", "result"):
            light = any("cublasLt" in argument.type for argument in call.prototype.arguments)
            where = f"driver.factors_on_device({is_beta(field)})" if light else "driver.on_device()"
            place = f"static_cast<{field.argument.type}>(driver.place({where}))"
            body.append(f"const auto {field.name} = {place};")
        elif field.name not in lengths:
            body.append(drawn(field))
    # Spelled out: some names have overloads in the header.
    function = f"{call.prototype.result}({call.prototype.types()})"
    names = ", ".join(call.prototype.names())
    body.append(f'driver.saw("{call.name}", driver.find<{function}>("{call.name}")({names}));')
    body += [f"driver.saw({field.name}, sizeof *{field.name});" for field in call.of_kind("out")]
    for field in call.of_kind("result"):
        size = "2" if field.pointee == "void" else size_of_result(field)  # no type is shorter
        body.append(f"if (!driver.on_device()) driver.saw({field.name}, {size});")
    return definition(f"void drive_{call.name}(driver::Driver& driver)", body)


def main(argv: list[str]) -> int:
    arguments = command(__doc__).parse_args(argv)

    def texts() -> dict[str, str]:
        table = read_table(arguments.calls, arguments.include)
        calls = [call for call in table.carried if call.library == "cublas"]
        echoes = [echo(call) for call in calls if call.name not in BY_HAND]
        driven = [call for call in calls if not call.of_kind("makes", "destroys")]
        driven = [call for call in driven if call.name not in BY_HAND - {"cublasLtMatmulDescSetAttribute"}]
        rows = "\n".join(f"      drive_{call.name}," for call in driven)
        return {
            "blas_echo_calls.cpp": f'{DO_NOT_EDIT}#include "proxy/tests/blas_echo.h"\n\nextern "C" {{\n'
            + "\n".join(echoes)
            + "\n}\n",
            "blas_drives.cpp": f'{DO_NOT_EDIT}#include "proxy/tests/blas_driver.h"\n\nnamespace {{\n'
            + "\n".join(map(drive, driven))
            + "\n}\nconst std::vector<driver::Call>& driver::calls() {\n"
            + f"  static const std::vector<Call> all{{\n{rows}\n  }};\n  return all;\n}}\n",
        }

    return write_files(arguments, texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
