"""Writes libjitckpt.so's entry points and the class of real calls, from calls.toml and NVIDIA's own headers.

CMake runs it: generate.py --calls calls.toml --include DIR... --output DIR
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clang import cindex  # type: ignore[import-untyped]

HEADERS = '#include "device_api/libraries.h"\n'
GATED = {"enqueue", "synchronous", "collective", "rendezvous"}
# nccl.h includes these types without using them, and they need more headers than torch's wheels bring.
UNUSED_HEADERS = ["-D__CUDA_FP16_H__", "-D__CUDA_BF16_H__", "-D__CUDA_FP8_H__"]
KINDS = GATED | {"order", "query", "create", "destroy", "free", "other"}
FIELDS = {"kind", "save", "observe", "device", "host", "either", "count", "prototype", "newer"}
# See generate_proxy.py.
PROXY_FIELDS = {
    "proxy",
    "out",
    "makes",
    "destroys",
    "kernel",
    "sets",
    "scalars",
    "result",
    "bytes",
    "in",
    "writes",
}
DO_NOT_EDIT = (
    "// Written by native/device_api/generate.py from calls.toml and NVIDIA's headers: change those.\n"
)


class TableError(Exception):
    """The table contradicts itself or the headers."""


@dataclass(frozen=True)
class Argument:
    type: str
    name: str


@dataclass(frozen=True)
class Prototype:
    name: str
    result: str
    arguments: tuple[Argument, ...]

    def declaration(self) -> str:
        return f"{self.result} {self.name}({', '.join(f'{a.type} {a.name}' for a in self.arguments)})"

    def types(self) -> str:
        return ", ".join(a.type for a in self.arguments)

    def names(self) -> list[str]:
        return [a.name for a in self.arguments]

    def named(self, *type_names: str) -> str | None:
        """The name of the first argument of one of these types."""
        return next((a.name for a in self.arguments if a.type in type_names), None)

    def stream(self) -> str | None:
        """The name of its stream, which the runtime and the driver call differently."""
        return self.named("cudaStream_t", "CUstream")


@dataclass(frozen=True)
class Call:
    library: str
    prototype: Prototype
    kind: str
    save: str
    observe: str
    count: str
    private: bool  # no header that can be included declares it

    @property
    def name(self) -> str:
        return self.prototype.name


def read_prototypes(include: list[str], extra: str, defines: list[str]) -> dict[str, Prototype]:
    """Every function that the headers declare, by name; `extra` are declarations that they lack."""
    source = HEADERS + 'extern "C" {\n' + extra + "}\n"
    arguments = ["-x", "c++", "-std=c++20", *UNUSED_HEADERS, *defines]
    for folder in [str(Path(__file__).parents[1]), *include]:  # native/, where includes begin
        arguments += ["-isystem", folder]
    unit = cindex.Index.create().parse("calls.cpp", args=arguments, unsaved_files=[("calls.cpp", source)])
    problems = [str(d) for d in unit.diagnostics if d.severity >= cindex.Diagnostic.Error]
    if problems:
        raise TableError("NVIDIA's headers can't be read:\n" + "\n".join(problems[:10]))
    return {function.spelling: prototype_of(function) for function in functions_in(unit.cursor)}


@dataclass(frozen=True)
class Source:
    """calls.toml, and what the headers declare, by name; twins: with calls on the per-thread stream."""

    entries: dict[str, tuple[str, dict[str, Any]]]  # library and entry
    messages: dict[str, dict[str, str]]  # of the proxy: no calls of a library's
    plain: dict[str, Prototype]
    twins: dict[str, Prototype]


def read_source(path: Path, include: list[str]) -> Source:
    table = tomllib.loads(path.read_text())
    messages = table.pop("proxy", {})
    entries = {
        name: (library, entry)
        for library, calls in table.items()
        for names, entry in calls.items()
        for name in spelled_out(names)
    }
    extra = "".join(entry["prototype"] + ";\n" for _, entry in entries.values() if "prototype" in entry)
    plain = read_prototypes(include, extra, [])
    twins = read_prototypes(include, extra, ["-DCUDA_API_PER_THREAD_DEFAULT_STREAM"])
    return Source(entries, messages, plain, twins)


def spelled_out(names: str) -> list[str]:
    """What a key of the table stands for: cublas[SD]gemm_v2 is cublasSgemm_v2 and cublasDgemm_v2."""
    head, bracket, rest = names.partition("[")
    letters, _, tail = rest.partition("]")
    return [head + letter + tail for letter in letters] if bracket else [names]


def functions_in(cursor: Any) -> Iterator[Any]:
    """What the libraries define; the headers' own C++ overloads have a body and are none of it."""
    for child in cursor.get_children():
        if child.kind == cindex.CursorKind.FUNCTION_DECL and not child.is_definition():
            yield child
        elif child.kind in (cindex.CursorKind.LINKAGE_SPEC, cindex.CursorKind.UNEXPOSED_DECL):
            yield from functions_in(child)


def prototype_of(function: Any) -> Prototype:
    arguments = tuple(
        Argument(argument.type.spelling.replace("[]", "*"), argument.spelling or f"argument{index}")
        for index, argument in enumerate(function.get_arguments())
    )
    return Prototype(function.spelling, function.result_type.spelling, arguments)


def read_table(path: Path, include: list[str]) -> list[Call]:
    """The calls of the table, each checked against its prototype, with their per-thread-stream twins."""
    source = read_source(path, include)
    plain, twins = source.plain, source.twins
    calls = []
    for name, (library, entry) in source.entries.items():
        prototype = plain.get(name)
        if prototype is None and entry.get("newer"):
            continue
        if prototype is None:
            raise TableError(f"{name} is in {path.name}, but no header declares it")
        check(entry, prototype, plain)
        variants = [prototype]
        variants += [
            twins[name + end] for end in ("_ptsz", "_ptds") if name + end in twins and name + end not in plain
        ]
        for variant in variants:
            calls.append(
                Call(
                    library=library,
                    prototype=variant,
                    kind=entry["kind"],
                    save=entry.get("save", ""),
                    observe=entry.get("observe", ""),
                    count=entry.get("count", ""),
                    private="prototype" in entry,
                )
            )
    return calls


def check(entry: dict[str, Any], prototype: Prototype, known: dict[str, Prototype]) -> None:
    unknown = set(entry) - FIELDS - PROXY_FIELDS
    if unknown:
        raise TableError(f"{prototype.name} has the unknown fields {sorted(unknown)}")
    if entry["kind"] not in KINDS:
        raise TableError(f"{prototype.name} is of the unknown kind {entry['kind']!r}")
    if entry.get("observe", "") not in ("", "before", "after", "around"):
        raise TableError(
            f"{prototype.name} is observed {entry['observe']!r}: it can be 'before', 'after' or 'around'"
        )
    by_name = {a.name: a for a in prototype.arguments}
    for field in ("device", "host", "either"):
        for name in entry.get(field, []):
            if name not in by_name or "*" not in by_name[name].type:
                raise TableError(f"{prototype.name} has no pointer argument {name!r} ({field})")
    if entry["kind"] == "collective" and (
        entry.get("count") not in by_name
        or not all(prototype.named(t) for t in ("cudaStream_t", "ncclComm_t", "ncclDataType_t"))
    ):
        raise TableError(
            f"{prototype.name} is a collective: it needs a count, a datatype, a communicator and a stream"
        )
    save = entry.get("save", "")
    if save not in ("", "hand") and (save not in known or known[save].named("cudaStream_t") is None):
        raise TableError(f"{prototype.name} becomes {save!r} in a save, which is no call with a stream")


def real_calls(calls: list[Call]) -> str:
    """The real functions under their own names in namespace jitckpt::real, each looked up once."""
    lines = [
        DO_NOT_EDIT,
        "#pragma once",
        HEADERS + '#include "device_api/real_symbols.h"\n',
        "namespace jitckpt::real {",
    ]
    for call in calls:
        if call.kind == "other" and call.private:
            continue
        p = call.prototype
        lines.append(
            f"inline constinit Symbol<{p.result} (*)({p.types()})> symbol_{p.name}"
            f'{{Library::{call.library}, "{p.name}"}};\n'
            f"inline {p.declaration()} {{\n"
            f"  const auto function = symbol_{p.name}.get();\n"
            f"  if (!function) [[unlikely]] return missing<{p.result}>();\n"
            f"  return function({', '.join(p.names())});\n"
            "}"
        )
    lines.append("}  // namespace jitckpt::real\n")
    return "\n".join(lines)


def is_ours(call: Call) -> bool:
    """Whether observe mode needs to stand in the way of this call."""
    if call.kind in GATED or call.kind == "free" or call.observe or call.save:
        return True
    return call.kind in ("order", "query") and call.prototype.stream() is not None


def observers(calls: list[Call]) -> str:
    """Declarations of what is written by hand: the compiler then sees a missing or a wrong one."""
    hand = [c for c in calls if is_ours(c)]
    lines = [DO_NOT_EDIT, "#pragma once", HEADERS, "namespace jitckpt::interpose::observe {"]
    for call in hand:
        if call.name != base_name(call):
            continue  # its twin's sees it
        p = call.prototype
        if call.observe in ("before", "around"):
            lines.append(Prototype(before_name(call), "void", p.arguments).declaration() + ";")
        if call.observe in ("after", "around"):
            arguments = (Argument(p.result, "result"), *p.arguments)
            lines.append(Prototype(p.name, "void", arguments).declaration() + ";")
    lines += ["}", "namespace jitckpt::interpose::save {"]
    base = {base_name(c): c.prototype for c in hand if c.save == "hand"}
    lines += [Prototype(name, p.result, p.arguments).declaration() + ";" for name, p in base.items()]
    lines += ["}", "namespace jitckpt::interpose::hold {"]
    lines += [c.prototype.declaration() + ";" for c in hand if c.kind == "free"]
    lines.append("}\n")
    return "\n".join(lines)


def before_name(call: Call) -> str:
    """What sees the call before it is made."""
    return ("before_" if call.observe == "around" else "") + base_name(call)


def base_name(call: Call) -> str:
    return call.name.removesuffix("_ptsz").removesuffix("_ptds")


def in_save(call: Call) -> str:
    """What a thread that works for a save does instead of the real call; may fall through to it."""
    p = call.prototype
    if call.kind in ("collective", "rendezvous"):
        return f'return refuse("{p.name}");'
    if call.save == "hand":
        return f"return save::{base_name(call)}({', '.join(p.names())});"
    if call.save:
        names = ", ".join([*p.names(), "save::stream()"])
        return f"return save::synchronised(real::{call.save}({names}));"
    stream = p.stream() if call.kind in GATED | {"order", "query"} else None
    return f"{stream} = save::stream();" if stream else ""


def stream_behind_which_it_waits(call: Call) -> str | None:
    """The argument, for a call that returns before the device has come to it."""
    if call.kind not in ("enqueue", "collective") or call.name != base_name(call):
        return None
    of_config = call.prototype.named("const cudaLaunchConfig_t *")
    return f"{of_config}->stream" if of_config else call.prototype.stream()


def entry_point(call: Call) -> str:
    p = call.prototype
    arguments = ", ".join(p.names())
    body = []
    if call.kind in GATED:
        if not call.observe:
            body.append(f"if (!attentive()) [[likely]] return real::{p.name}({arguments});")
        body.append("const Passage passage(Gate::waits);")
        if in_save(call):
            body.append(f"if (passage.in_save()) {{ {in_save(call)} }}")
        if stream := stream_behind_which_it_waits(call):
            body.append(f"if (!passage.in_save()) run_ahead::before_call({stream});")
    elif call.kind == "free":
        body.append(f"if (holding()) [[unlikely]] return hold::{p.name}({arguments});")
        body.append("const Passage passage(Gate::ignores);")
    elif in_save(call):
        body.append(f"if (holding() && in_save()) [[unlikely]] {{ {in_save(call)} }}")
    if call.kind == "collective":
        body.append(f"observe::before_collective({p.named('cudaStream_t')});")
    if call.observe in ("before", "around"):
        body.append(f"observe::{before_name(call)}({arguments});")
    if call.observe in ("after", "around") or call.kind == "collective":
        body.append(f"const {p.result} result = real::{p.name}({arguments});")
        if call.kind == "collective":
            stream, communicator, datatype = (
                p.named(t) for t in ("cudaStream_t", "ncclComm_t", "ncclDataType_t")
            )
            peer = ", peer" if "peer" in p.names() else ""
            body.append(
                f'observe::collective(result, "{p.name}", {communicator}, {call.count}, '
                f"{datatype}, {stream}{peer});"
            )
        else:
            body.append(f"observe::{base_name(call)}({', '.join(['result', *p.names()])});")
        body.append("return result;")
    else:
        body.append(f"return real::{p.name}({arguments});")
    return definition(p.declaration(), body)


def definition(declaration: str, body: list[str]) -> str:
    """A function's text, from its statements."""
    return declaration + " {\n" + "".join(f"  {line}\n" for line in body) + "}"


def entry_points(calls: list[Call]) -> str:
    lines = [
        DO_NOT_EDIT,
        *(f'#include "interpose/{name}.h"\n' for name in ("entry", "observers", "run_ahead", "save_calls")),
        '#include "real_calls.h"\n',
        "namespace real = jitckpt::real;\nusing namespace jitckpt::interpose;\n",
        '#pragma GCC visibility push(default)\nextern "C" {',
    ]
    lines += [entry_point(call) for call in calls if is_ours(call)]
    lines.append("}\n#pragma GCC visibility pop\n")
    return "\n".join(lines)


def command(description: str | None) -> argparse.ArgumentParser:
    """What every generator is told by CMake."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--calls", type=Path, required=True)
    parser.add_argument("--include", action="append", required=True)
    parser.add_argument("--output", type=Path, required=True)
    return parser


def write_files(arguments: argparse.Namespace, texts: Callable[[], dict[str, str]]) -> int:
    """Write what `texts` returns, by the files' names; returns the exit status."""
    try:
        files = texts()
    except TableError as error:
        print(f"{arguments.calls}: {error}", file=sys.stderr)
        return 1
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (arguments.output / name).write_text(text)
    return 0


def main(argv: list[str]) -> int:
    arguments = command(__doc__).parse_args(argv)

    def texts() -> dict[str, str]:
        calls = read_table(arguments.calls, arguments.include)
        return {
            "real_calls.h": real_calls(calls),
            "hand_written.h": observers(calls),
            "entry_points.cpp": entry_points(calls),
        }

    return write_files(arguments, texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
