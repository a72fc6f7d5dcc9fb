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
}
CARRIED = ("tells", "asks", "waits")
RESULTS = {"cudaError_t": "cudaErrorNotSupported", "ncclResult_t": "ncclInvalidUsage"}


@dataclass(frozen=True)
class Field:
    """An argument on the wire: `kind` is value, pointer, handle, kernel, out, makes or destroys."""

    argument: Argument
    kind: str

    @property
    def name(self) -> str:
        return self.argument.name

    @property
    def pointee(self) -> str:
        """What an out argument points to."""
        return self.argument.type.removesuffix("*").strip()

    @property
    def table(self) -> str:
        """The server's table of a handle's kind."""
        return HANDLES[bare(self.argument.type.removesuffix("*"))]

    @property
    def member(self) -> str:
        kept = {"value": self.argument.type, "pointer": self.argument.type}
        return f"{kept.get(self.kind, 'uint64_t')} {self.name};"


@dataclass(frozen=True)
class Carried:
    """A call that the generated code carries."""

    prototype: Prototype
    library: str
    runs: str
    kind: str  # what calls.toml says of it
    destroys: str  # the argument that ends; may be empty
    fields: tuple[Field, ...]

    @property
    def name(self) -> str:
        return self.prototype.name

    def of_kind(self, kind: str) -> list[Field]:
        return [field for field in self.fields if field.kind == kind]


@dataclass(frozen=True)
class Table:
    carried: list[Carried]
    messages: dict[str, dict[str, str]]  # what is written by hand on both sides: library, and how it runs
    by_hand: list[Prototype]  # entry points that are written by hand
    refused: list[Prototype]


def bare(type_name: str) -> str:
    return type_name.replace("const ", "").strip()


def field_of(prototype: Prototype, argument: Argument, entry: dict[str, Any]) -> Field:
    pointers = [*entry.get("device", []), *entry.get("either", [])]
    if argument.name in entry.get("out", []):
        kind = "out"
    elif argument.name == entry.get("makes"):
        kind = "makes"
    elif argument.name == entry.get("destroys") and bare(argument.type) in HANDLES:
        kind = "destroys"
    elif argument.name in entry.get("kernel", []):
        kind = "kernel"
    elif bare(argument.type) in HANDLES:
        kind = "handle"
    elif argument.name in pointers:
        kind = "pointer"
    elif "*" in argument.type:
        raise TableError(f"{prototype.name}: nothing says what the pointer {argument.name!r} is to the proxy")
    else:
        kind = "value"
    if (kind in ("out", "makes")) != argument.type.endswith("*") and kind not in ("pointer", "kernel"):
        raise TableError(f"{prototype.name}: {argument.name!r} can't be of the kind {kind!r}")
    return Field(argument, kind)


def read_table(path: Path, include: list[str]) -> Table:
    """The calls that the table has the proxy carry; all others of the headers are refused."""
    source = read_source(path, include)
    carried: list[Carried] = []
    by_hand: list[Prototype] = []
    refused: list[Prototype] = []
    for name, prototype in (source.twins | source.plain).items():
        if not name.removeprefix("__").startswith(("cuda", "nccl")):
            continue
        library, entry = source.entries.get(name, ("", {}))
        how = entry.get("proxy")
        if how in CARRIED:
            fields = tuple(field_of(prototype, argument, entry) for argument in prototype.arguments)
            named = [*entry.get("out", []), *entry.get("kernel", [])]
            named += [entry[one] for one in ("makes", "destroys") if one in entry]
            if missing := set(named) - set(prototype.names()):
                raise TableError(f"{name} has no arguments {sorted(missing)}")
            carried.append(Carried(prototype, library, how, entry["kind"], entry.get("destroys", ""), fields))
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
        members = [field.member for field in call.fields if field.kind != "out"]
        answers = [f"{field.pointee} {field.name};" for field in call.of_kind("out")]
        body.append(f"struct {call.name} {{ {' '.join(members)} }};")
        if answers:
            body.append(f"struct {call.name}_answer {{ {' '.join(answers)} }};")
    body.append("}  // namespace wire")
    text = "\n".join(body)
    digest = hashlib.sha256(text.encode() + hash_of_more).hexdigest()[:16]
    return (
        f"{DO_NOT_EDIT}#pragma once\n{HEADERS}#include <cstdint>\n\nnamespace jitckpt::proxy {{\n"
        f"inline constexpr uint64_t table_hash = 0x{digest}u;\n{text}\n}}  // namespace jitckpt::proxy\n"
    )


def client_entry(call: Carried) -> str:
    p = call.prototype
    outs, makes = call.of_kind("out"), call.of_kind("makes")
    body = [f"if (!{field.name}) return client::no_place<{p.result}>();" for field in makes]
    body += [
        f"const uint64_t kernel_{field.name} = client::kernel_number({field.name});\n"
        f"  if (kernel_{field.name} == 0) return client::newest_error();"
        for field in call.of_kind("kernel")
    ]
    body += [f"const uint64_t made_{field.name} = client::new_handle();" for field in makes]
    sent = {
        "value": "{0}",
        "pointer": "{0}",
        "handle": "client::number_of({0})",
        "destroys": "client::number_of({0})",
        "makes": "made_{0}",
        "kernel": "kernel_{0}",
    }
    members = [f".{f.name} = {sent[f.kind].format(f.name)}" for f in call.fields if f.kind != "out"]
    body.append(f"const wire::{call.name} arguments{{{', '.join(members)}}};")
    if call.runs == "tells":
        function = "tell_collective" if call.kind == "collective" else "tell"
        told = f"client::{function}<{p.result}>(Call::{call.name}, arguments)"
        if not makes and not call.destroys:
            body.append(f"return {told};")
            return definition(p.declaration(), body)
        body.append(f"const auto result = {told};")
    else:
        answer = ""
        function = "look" if call.kind == "query" else "ask"
        if outs:
            body.append(f"wire::{call.name}_answer answer;")
            answer = ", answer"
        asked = f"client::{function}<{p.result}>(Call::{call.name}, arguments{answer})"
        body.append(f"const auto result = {asked};")
        for field in outs:
            body.append(f"if (result == {p.result}(0) && {field.name}) *{field.name} = answer.{field.name};")
    for field in makes:
        body.append(f"if (result != {p.result}(0)) return result;")
        noted = f"made_{field.name}, Call::{call.name}, client::bytes_of(arguments)"
        body.append(f"client::note_object({noted});")
        body.append(f"*{field.name} = reinterpret_cast<{field.pointee}>(made_{field.name});")
    if call.destroys:
        body.append(f"if (result == {p.result}(0)) client::note_end(client::number_of({call.destroys}));")
    body.append("return result;")
    return definition(p.declaration(), body)


def client(table: Table) -> str:
    lines = [
        DO_NOT_EDIT,
        '#include "kernels.h"\n#include "objects.h"\n#include "requests.h"\n',
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


def service(call: Carried) -> str:
    p = call.prototype
    outs, makes, destroys = call.of_kind("out"), call.of_kind("makes"), call.of_kind("destroys")
    uses = [field for field in call.fields if field.kind not in ("out",)]
    body = []
    if uses:
        body.append(f"const auto arguments = request.arguments<wire::{call.name}>();")
    else:
        body.append("static_cast<void>(request);")
    if outs:
        body.append(f"auto& answer = request.answer<wire::{call.name}_answer>();")
    body += [f"{field.pointee} made{{}};" for field in makes]
    given = {
        "value": "arguments.{0}",
        "pointer": "arguments.{0}",
        "handle": "request.server.{1}.find(arguments.{0})",
        "destroys": "request.server.{1}.find(arguments.{0})",
        "makes": "&made",
        "kernel": "request.server.kernels.stub(arguments.{0})",
        "out": "&answer.{0}",
    }
    names = [
        given[f.kind].format(f.name, f.table if f.kind in ("handle", "destroys") else "") for f in call.fields
    ]
    body.append(f"const auto result = real::{call.name}({', '.join(names)});")
    body += [
        f"if (result == {p.result}(0)) request.server.{field.table}.add(arguments.{field.name}, made);"
        for field in makes
    ]
    body += [
        f"if (result == {p.result}(0)) request.server.{field.table}.remove(arguments.{field.name});"
        for field in destroys
    ]
    body.append("return result;")
    return definition(f"int32_t serve_{call.name}(Request& request)", body)


def server(table: Table) -> str:
    lines = [
        DO_NOT_EDIT,
        '#include "real_calls.h"\n#include "server.h"\n#include "services.h"\n',
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
