"""Writes the device proxy's code from calls.toml and NVIDIA's headers: their common part, client, server.

CMake runs it: generate_proxy.py --calls calls.toml --include DIR... --agreed FILE... --output DIR
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generate import (
    DO_NOT_EDIT,
    HEADERS,
    Argument,
    Prototype,
    TableError,
    command,
    definition,
    read_source,
    write_files,
)

# The name of a virtual handle's type, and of the server's table for it.
HANDLES = {
    "cudaStream_t": "streams",
    "cudaEvent_t": "events",
    "ncclComm_t": "communicators",
    "ncclRedOp_t": "reductions",
    "cublasHandle_t": "blas_handles",
    "cublasLtHandle_t": "blas_handles",  # torch uses one handle for both
    "cublasLtMatmulDesc_t": "matmul_descriptions",
    "cublasLtMatrixLayout_t": "matrix_layouts",
    "cublasLtMatmulPreference_t": "matmul_preferences",
}
LIBRARIES = ("cuda", "nccl", "cublas")  # how their calls begin
CARRIED = ("tells", "asks", "waits")
# On a stream that captures: what puts no node into the graph.
EVENTS_IN_CAPTURE = {
    "cudaEventRecord": "if (client::captures(stream)) return client::record_in_capture(stream, event);",
    "cudaEventRecordWithFlags": "if (client::captures(stream)) "
    "return client::record_in_capture(stream, event, flags);",
    "cudaStreamWaitEvent": "if (client::waits_in_capture(stream, event)) "
    "return client::wait_in_capture(stream, event, flags);",
}
RESULTS = ("cudaError_t", "ncclResult_t", "cublasStatus_t")
# Of what a call writes, by name; others are arguments.
FACTORS = {"ranks": "client::ranks_of(comm)", "datatype": "client::element_bytes(datatype)"}


@dataclass(frozen=True)
class Field:
    """An argument on the wire.

    kind: value, pointer, handle, kernel, out, makes, destroys, scalar, result, bytes or in.
    """

    argument: Argument
    kind: str

    @property
    def name(self) -> str:
        return self.argument.name

    @property
    def pointee(self) -> str:
        """What an argument points to."""
        return bare(self.argument.type.removesuffix("*"))

    @property
    def table(self) -> str:
        """The server's table of a handle's kind."""
        return HANDLES[bare(self.argument.type.removesuffix("*"))]

    @property
    def member(self) -> str:
        kept = {
            "value": self.argument.type,
            "pointer": self.argument.type,
            "scalar": "Scalar",
            "in": f"Given<{self.pointee}>",
        }
        return f"{kept.get(self.kind, 'uint64_t')} {self.name};"

    @property
    def answered(self) -> str:
        """Its member in the answer."""
        if self.kind == "result":
            return f"alignas(16) std::byte {self.name}[16];"
        return f"{self.pointee} {self.name};"


@dataclass(frozen=True)
class Carried:
    """A call that the generated code carries."""

    prototype: Prototype
    library: str
    runs: str
    kind: str  # what calls.toml says of it
    destroys: str  # the argument that ends; may be empty
    sets: str  # the handle whose setting it is; may be empty
    writes: tuple[str, ...]  # the memory, and the factors of its bytes; may be empty
    fields: tuple[Field, ...]

    @property
    def name(self) -> str:
        return self.prototype.name

    def of_kind(self, *kinds: str) -> list[Field]:
        return [field for field in self.fields if field.kind in kinds]


@dataclass(frozen=True)
class Table:
    carried: list[Carried]
    messages: dict[str, dict[str, str]]  # what is written by hand on both sides: library, and how it runs
    by_hand: list[Prototype]  # entry points that are written by hand
    refused: list[Prototype]


def bare(type_name: str) -> str:
    return type_name.replace("const ", "").strip()


def field_of(prototype: Prototype, argument: Argument, entry: dict[str, Any]) -> Field:
    kind = kinds_of(entry).get(argument.name)
    if kind == "destroys" and bare(argument.type) not in HANDLES:
        kind = "pointer"  # memory
    if kind is None and bare(argument.type) in HANDLES:
        kind = "handle"
    if kind is None and "*" in argument.type:
        raise TableError(f"{prototype.name}: nothing says what the pointer {argument.name!r} is to the proxy")
    kind = kind or "value"
    behind_pointers = ("out", "makes", "scalar", "result", "bytes", "in")
    if (kind in behind_pointers) != argument.type.endswith("*") and kind not in ("pointer", "kernel"):
        raise TableError(f"{prototype.name}: {argument.name!r} can't be of the kind {kind!r}")
    return Field(argument, kind)


def kinds_of(entry: dict[str, Any]) -> dict[str, str]:
    """What a row says of its arguments, by name."""
    lists = {"device": "pointer", "either": "pointer", "kernel": "kernel", "scalars": "scalar", "in": "in"}
    kinds = {name: kind for key, kind in lists.items() for name in entry.get(key, [])}
    kinds |= {entry[key]: key for key in ("makes", "destroys", "result") if key in entry}
    return kinds | dict.fromkeys(entry.get("bytes", {}), "bytes") | dict.fromkeys(entry.get("out", []), "out")


def read_table(path: Path, include: list[str]) -> Table:
    """The calls that the table has the proxy carry; all others of the headers are refused."""
    source = read_source(path, include)
    carried: list[Carried] = []
    by_hand: list[Prototype] = []
    refused: list[Prototype] = []
    for name, prototype in (source.twins | source.plain).items():
        if not name.removeprefix("__").startswith(LIBRARIES):
            continue
        library, entry = source.entries.get(name, ("", {}))
        how = entry.get("proxy")
        if how in CARRIED:
            fields = tuple(field_of(prototype, argument, entry) for argument in prototype.arguments)
            writes = tuple(entry.get("writes", ()))
            named = {*kinds_of(entry), *entry.get("bytes", {}).values(), entry.get("sets"), *writes}
            named -= {None, *FACTORS}
            if missing := named - set(prototype.names()):
                raise TableError(f"{name} has no arguments {sorted(missing)}")
            ends, sets = entry.get("destroys", ""), entry.get("sets", "")
            carried.append(Carried(prototype, library, how, entry["kind"], ends, sets, writes, fields))
        elif how == "client":
            by_hand.append(prototype)
        elif how is not None:
            raise TableError(f"{name} is carried {how!r}: it can be 'client' or one of {CARRIED}")
        elif prototype.result in RESULTS:
            refused.append(prototype)
    return Table(carried, source.messages, by_hand, refused)


def agreed(table: Table, hash_of_more: bytes) -> str:
    """What both sides include: the calls' numbers, the contents of records and answers, a hash of it all."""
    names = [*table.messages, *(call.name for call in table.carried)]
    body = [f"enum class Call : uint16_t {{ {', '.join(names)}, count }};", "namespace wire {"]
    for call in table.carried:
        members = [field.member for field in call.fields if field.kind not in ("out", "bytes")]
        answers = [field.answered for field in call.of_kind("out", "result")]
        body.append(f"struct {call.name} {{ {' '.join(members)} }};")
        if answers:
            body.append(f"struct {call.name}_answer {{ {' '.join(answers)} }};")
    body.append("}  // namespace wire")
    text = "\n".join(body)
    digest = hashlib.sha256(text.encode() + hash_of_more).hexdigest()[:16]
    return (
        f'{DO_NOT_EDIT}#pragma once\n{HEADERS}#include "proxy/wire_parts.h"\n\nnamespace jitckpt::proxy {{\n'
        f"inline constexpr uint64_t table_hash = 0x{digest}u;\n{text}\n}}  // namespace jitckpt::proxy\n"
    )


def scalar(call: Carried, field: Field) -> str:
    """How the client packs a scalar: the pointer mode is that of the handle, or of the description."""
    arguments = {argument.type: argument.name for argument in call.prototype.arguments}
    if description := arguments.get("cublasLtMatmulDesc_t"):
        return f"client::scalar({description}, {field.name}, client::Factor::{field.name})"
    handle = arguments["cublasHandle_t"]
    if field.pointee == "void":
        return f"client::scalar({handle}, {field.name}, client::scalar_bytes(computeType, Ctype))"
    return f"client::scalar({handle}, {field.name}, sizeof *{field.name})"


def sent(call: Carried, field: Field) -> str:
    """What the client puts into a record for an argument."""
    return {
        "value": "{0}",
        "pointer": "{0}",
        "handle": "client::number_of({0})",
        "destroys": "client::number_of({0})",
        "makes": "made_{0}",
        "kernel": "kernel_{0}",
        "in": "client::given({0})",
        "result": "client::result_address(handle, {0})",
        "scalar": scalar(call, field) if field.kind == "scalar" else "",
    }[field.kind].format(field.name)


def captured(call: Carried) -> list[str]:
    """What the client does where the stream captures: the call becomes a part of a graph, or is refused."""
    p = call.prototype
    types = {argument.type: argument.name for argument in p.arguments}
    if call.name in EVENTS_IN_CAPTURE:
        return [EVENTS_IN_CAPTURE[call.name]]
    if call.library == "cublas":
        if call.sets or not call.of_kind("scalar", "result"):
            return []
        if stream := types.get("cudaStream_t"):
            condition = f"client::captures({stream})"
        else:
            condition = f"client::captures_of_handle(client::number_of({types['cublasHandle_t']}))"
        return [f'if ({condition}) return client::refuse<{p.result}>("{p.name} in a CUDA graph");']
    stream = types.get("cudaStream_t")
    if stream is None or call.runs != "tells" or call.destroys:
        return []
    library = "nccl" if p.result == "ncclResult_t" else "cudart"
    kind = "Memcpy" if "Memcpy" in p.name else "Kernel"
    return [
        f"if (client::captures({stream})) return {p.result}(client::capture(Library::{library}, {stream}, "
        f"cudaGraphNodeType{kind}, [=](cudaStream_t {stream}) "
        f"{{ return int32_t({p.name}({', '.join(p.names())})); }}));"
    ]


def client_entry(call: Carried) -> str:
    p = call.prototype
    success = f"{p.result}(0)"
    content = call.of_kind("bytes")
    body = captured(call)
    body += [f"if (!{field.name}) return client::no_place<{p.result}>();" for field in call.of_kind("makes")]
    body += [
        f"const uint64_t kernel_{field.name} = client::kernel_number({field.name});\n"
        f"  if (kernel_{field.name} == 0) return client::newest_error();"
        for field in call.of_kind("kernel")
    ]
    body += [f"const uint64_t made_{field.name} = client::new_handle();" for field in call.of_kind("makes")]
    members = [f".{f.name} = {sent(call, f)}" for f in call.fields if f.kind not in ("out", "bytes")]
    body.append(f"const wire::{call.name} arguments{{{', '.join(members)}}};")
    more = ""
    for field in content:
        body.append(f"const client::Bytes more = client::bytes_at({field.name}, sizeInBytes);")
        more = ", more"
    if call.writes:
        place, *factors = call.writes
        factors += [name for name in FACTORS if name in p.names()]
        size = " * ".join(FACTORS.get(name, name) for name in factors)
        body.append(f"if (client::state_is_still()) client::writes({place}, {size});")
    tell = "tell_collective" if call.kind == "collective" else "tell"
    told = f"client::{tell}<{p.result}>(Call::{call.name}, arguments{more})"
    noted = f"Call::{call.name}, client::bytes_of(arguments)"
    results = call.of_kind("result")
    for field in results:  # on the device: nobody waits for it
        body.append(f"if (arguments.{field.name} != 0) return {told};")
    outs = call.of_kind("out", "result")
    if call.runs == "tells":
        if not (call.of_kind("makes") or call.destroys or call.sets):
            return definition(p.declaration(), [*body, f"return {told};"])
        asked = told
    else:
        function = "look" if call.kind == "query" else "ask"
        if outs:
            body.append(f"wire::{call.name}_answer answer;")
        asked = f"client::{function}<{p.result}>(Call::{call.name}, arguments{', answer' if outs else ''})"
    # Not "result": so some call's argument is named.
    body.append(f"const {p.result} outcome = {asked};")
    for field in outs:
        size = "client::bytes_of_type(resultType)" if field.pointee == "void" else f"sizeof *{field.name}"
        source = f"answer.{field.name}" if field.kind == "result" else f"&answer.{field.name}"
        copy = f"std::memcpy({field.name}, {source}, {size});"
        body.append(f"if (outcome == {success} && {field.name}) {copy}")
    for field in call.of_kind("makes"):
        body.append(f"if (outcome != {success}) return outcome;")
        body.append(f"client::note_object(made_{field.name}, {noted});")
        body.append(f"*{field.name} = reinterpret_cast<{field.pointee}>(made_{field.name});")
    if call.sets:
        which = "static_cast<uint64_t>(attr)" if "attr" in p.names() else "0"
        body.append(
            f"if (outcome == {success}) client::note_setting(client::number_of({call.sets}), {which}, "
            f"{noted}{more});"
        )
    if call.destroys:
        body.append(f"if (outcome == {success}) client::note_end(client::number_of({call.destroys}));")
    return definition(p.declaration(), [*body, "return outcome;"])


def client(table: Table) -> str:
    lines = [
        DO_NOT_EDIT,
        "#include <cstring>\n",
        *(
            f'#include "proxy/client/{name}.h"'
            for name in ("blas", "capture", "kernels", "objects", "requests")
        ),
        'using namespace jitckpt::proxy;\n#pragma GCC visibility push(default)\nextern "C" {',
    ]
    lines += [client_entry(call) for call in table.carried]
    lines += [
        f'{p.declaration()} {{ return client::refuse<{p.result}>("{p.name}"); }}' for p in table.refused
    ]
    lines.append("}\n#pragma GCC visibility pop\n")
    # A parameter of a function that only refuses is not used.
    lines.insert(1, '#pragma GCC diagnostic ignored "-Wunused-parameter"')
    return "\n".join(lines)


def by_hand(table: Table) -> str:
    """Declarations of the entry points that are written by hand: the compiler sees what differs."""
    lines = [DO_NOT_EDIT, "#pragma once", HEADERS, '#pragma GCC visibility push(default)\nextern "C" {']
    lines += [p.declaration() + ";" for p in table.by_hand]
    lines.append("}\n#pragma GCC visibility pop\n")
    return "\n".join(lines)


def given(call: Carried, field: Field) -> str:
    """What the server gives to the real call for an argument."""
    found = f"request.server.{field.table}.find(arguments.{field.name})" if bare_handle(field) else ""
    if bare(field.argument.type) == "cublasLtHandle_t":
        found = f"reinterpret_cast<cublasLtHandle_t>({found})"
    type_name = field.argument.type
    return {
        "value": "arguments.{0}",
        "pointer": "arguments.{0}",
        "handle": found,
        "destroys": found,
        "makes": "&made",
        "kernel": "request.server.kernels.stub(arguments.{0})",
        "out": "&answer.{0}",
        "scalar": f"static_cast<{type_name}>(arguments.{{0}}.pointer())",
        "in": "arguments.{0}.pointer()",
        "result": f"arguments.{{0}} ? reinterpret_cast<{type_name}>(arguments.{{0}}) "
        f": reinterpret_cast<{type_name}>(answer.{{0}})",
        "bytes": f"request.content_after<wire::{call.name}>(arguments.sizeInBytes)",
    }[field.kind].format(field.name)


def bare_handle(field: Field) -> bool:
    return field.kind in ("handle", "destroys")


def service(call: Carried) -> str:
    p = call.prototype
    body = []
    if any(field.kind != "out" for field in call.fields):
        body.append(f"const auto arguments = request.arguments<wire::{call.name}>();")
    else:
        body.append("static_cast<void>(request);")
    if call.of_kind("out", "result"):
        body.append(f"auto& answer = request.answer<wire::{call.name}_answer>();")
    body += [f"{field.pointee} made{{}};" for field in call.of_kind("makes")]
    body.append(f"const auto result = real::{call.name}({', '.join(given(call, f) for f in call.fields)});")
    body += [
        f"if (result == {p.result}(0)) request.server.{field.table}.add(arguments.{field.name}, made);"
        for field in call.of_kind("makes")
    ]
    body += [
        f"if (result == {p.result}(0)) request.server.{field.table}.remove(arguments.{field.name});"
        for field in call.of_kind("destroys")
    ]
    body.append("return result;")
    return definition(f"int32_t serve_{call.name}(Request& request)", body)


def server(table: Table) -> str:
    lines = [
        DO_NOT_EDIT,
        '#include "proxy/server/server.h"\n#include "proxy/server/services.h"\n#include "real_calls.h"\n',
        "namespace real = jitckpt::real;\nnamespace jitckpt::proxy {\nnamespace {",
    ]
    lines += [service(call) for call in table.carried]
    lines.append("}  // namespace\nconst Service services[] = {")
    rows = [(name, entry["proxy"], entry["library"]) for name, entry in table.messages.items()]
    rows += [(call.name, call.runs, call.library) for call in table.carried]
    lines += [f'  {{"{n}", Runs::{runs}, Library::{where}, serve_{n}}},' for n, runs, where in rows]
    lines.append("};\n}  // namespace jitckpt::proxy\n")
    return "\n".join(lines)


def messages(table: Table) -> str:
    lines = [DO_NOT_EDIT, "#pragma once\n#include <cstdint>\n\nnamespace jitckpt::proxy {\nstruct Request;"]
    lines += [f"int32_t serve_{name}(Request& request);" for name in table.messages]
    lines.append("}  // namespace jitckpt::proxy\n")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = command(__doc__)
    parser.add_argument(
        "--agreed", action="append", type=Path, default=[], help="files that must be the same too"
    )
    arguments = parser.parse_args(argv)

    def texts() -> dict[str, str]:
        table = read_table(arguments.calls, arguments.include)
        return {
            "proxy_calls.h": agreed(table, b"".join(file.read_bytes() for file in arguments.agreed)),
            "proxy_by_hand.h": by_hand(table),
            "proxy_client.cpp": client(table),
            "proxy_services.h": messages(table),
            "proxy_server.cpp": server(table),
        }

    return write_files(arguments, texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
