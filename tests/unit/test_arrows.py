"""The house's laws: which room may use which, and what is reached from one place only.

The rooms are those of docs/how-it-works/architecture.md. A new arrow is a line in this table, or a mistake.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

ROOT = Path(__file__).parents[2]

# From the top of the house down. What has no room, such as errors.py, stands by itself.
PYTHON = {
    "__main__": "cli",
    "cli": "rehearsal agent agent/migration doctor web reports clusters planning worker/in_place "
    "worker/self_check events bindings faults formats objects device hosts saves decisions encoding "
    "console system wire errors",
    "rehearsal": "reports agent/proxies events faults saves wire errors",
    "agent": "agent/control agent/migration agent/proxies agent/processes ring events bindings faults tiers "
    "objects hosts saves decisions console system wire errors _memory_tier",
    "jitckpt": "worker worker/saving",  # the package's own names, imported when first asked for
    "doctor": "events bindings device hosts saves console system",
    "web": "reports events console system wire errors",
    "reports": "planning events tiers objects saves decisions console system errors",
    "planning": "decisions system _algorithms",
    "agent/control": "agent/processes ring events hosts decisions console wire errors",
    "agent/migration": "agent/proxies agent/processes decisions/transparent ring events bindings hosts "
    "decisions console system wire errors _pages",
    "agent/proxies": "agent/processes decisions/transparent events hosts decisions system wire _step_barrier",
    "agent/processes": "worker console system bindings wire",
    "frameworks": "worker worker/self_check state data encoding console system wire errors",
    "worker": "worker/lookouts worker/in_place worker/self_check worker/ends worker/saving ring hooks events "
    "bindings faults formats tiers saves state data decisions encoding console system wire errors",
    "worker/lookouts": "hooks state data encoding",
    "worker/in_place": "worker/ends hooks decisions/transparent bindings faults device state system wire "
    "errors _seen",
    "worker/self_check": "worker/saving hooks state encoding wire",
    "worker/ends": "ring system wire errors",
    "worker/saving": "ring bindings tiers saves state data decisions encoding console system wire errors "
    "_seen",
    "ring": "bindings saves state encoding wire errors _seen",
    "hooks": "state system errors _seen",
    "decisions/transparent": "wire errors",
    "events": "console system",
    "faults": "system bindings wire errors",
    "device": "bindings wire errors",
    "tiers": "hosts saves decisions encoding system wire errors _memory_tier",
    "objects": "hosts saves system wire errors",
    "formats": "saves state encoding errors",
    "hosts": "saves decisions console system wire errors",
    "clusters": "errors",
    "saves": "state decisions encoding console system bindings errors",
    "state": "data encoding system bindings wire errors _seen _tensors",
    "decisions": "wire errors",
    "data": "encoding system bindings errors _seen",
    "encoding": "errors",
    "console": "system",
    "system": "bindings wire errors _seen",
    "bindings": "wire errors _seen",
    "wire": "errors",
    "errors": "",
}

# The same for native/, from the quoted includes, which name the room; what is generated has none.
NATIVE = {
    "torch_memory": "proxy/client",
    "proxy/client": "proxy proxy/transport ground",
    "proxy/server": "proxy proxy/transport ground",
    "proxy": "proxy/transport device_api",
    "proxy/transport": "ground",
    "interpose": "watchdog device_api ground",
    "pages": "memory_tier",
    "store_connect": "ground",
    "softgpu/aten": "softgpu",
    "softgpu/host": "softgpu",
    "softgpu/nccl": "softgpu/runtime",
    "softgpu/runtime": "softgpu",
}

# A decision knows no process, no device and no clock.
PURE = {"decisions", "decisions/transparent", "wire", "errors"}
PURE_LIBRARIES = {
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "math",
    "re",
    "statistics",
    "typing",
}

# What torch calls private and we can't do without; a new torch may take it away.
RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
PRIVATE_NAMES = {
    "torch.numa.binding._maybe_wrap_command_args_with_numa_binding": "agent/worker_processes.py",
    "torch.cuda._lazy_call": "worker/in_place/keeper.py",
    "torch.distributed.distributed_c10d._get_default_store": "worker/agreements.py",
    "torch._foreach_copy_": "ring/gathering.py",
    "torch.distributed.tensor._random": "state/sent_numbers.py",
    "torch.distributed._compute_bucket_assignment_by_size": "state/first_buckets.py",
    "torch.distributed._register_comm_hook": "state/first_buckets.py",
    "torch.distributed._register_builtin_comm_hook": "state/first_buckets.py",
    "torch.utils.data._utils.pin_memory.pin_memory": "data/loader_workers.py",
    "torch.utils.data._utils.signal_handling": "system/signals.py",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": "data/loader_workers.py",
    "torch.distributed.elastic.agent.server.api._TERMINAL_STATE_SYNC_ID": "agent/agent.py",
    "torch.distributed.elastic.utils.store._barrier_nonblocking": "agent/agent.py",
    "torch._neg_view": "encoding/tensor_file.py",
    "torch._C._cuda_getCurrentRawStream": "bindings/interpose.py",
    "torch._amp_update_scale_": "state/schedules.py",
    "torch._C._current_graph_task_id": "hooks/torch_steps.py",
    "torch.autograd.graph._engine_run_backward": "worker/saving/history.py",
    "torch._dynamo.eval_frame": "hooks/untraced.py",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "hooks/untraced.py",
    f"{RENDEZVOUS}._BackendRendezvousStateHolder": "hosts/rendezvous_state.py",
    f"{RENDEZVOUS}._NodeDesc": "hosts/rendezvous_state.py",
    f"{RENDEZVOUS}._RendezvousExitOp": "hosts/rendezvous_state.py",
    f"{RENDEZVOUS}._RendezvousState": "hosts/rendezvous_state.py",
    f"{RENDEZVOUS}._Action": "hosts/giving_way.py",
    f"{RENDEZVOUS}._DistributedRendezvousOpExecutor": "hosts/giving_way.py",
    f"{RENDEZVOUS}._should_keep_alive": "hosts/giving_way.py",
}

# The same where objects of torch are asked for them, by an alias or by a string: who has which.
LOADERS = "torch.utils.data.dataloader"
PRIVATE_ATTRIBUTES = {
    "torch._C": "_cuda_getDeviceCount _cuda_isInBadFork",
    "torch.Generator": "_cdata",
    "torch.amp.GradScaler": "_growth_tracker _init_growth_tracker _init_scale _per_optimizer_states _scale",
    "torch.optim.lr_scheduler.LRScheduler": "_step_count",
    "torch.nn.Module": "_forward_hooks _forward_pre_hooks _non_persistent_buffers_set",
    "torch.nn.parallel.DistributedDataParallel": "_build_debug_param_to_name_mapping "
    "_build_params_for_reducer _comm_hooks _ddp_init_helper _get_ddp_logging_data",
    "torch.distributed.Reducer": "_remove_autograd_hooks _set_static_graph",
    "torch.distributed.Logger": "_set_comm_hook_name _set_static_graph",
    "torch.distributed.ProcessGroup": "_get_sequence_number_for_group",
    "torch.distributed.distributed_c10d": "_world",
    "torch.distributed.fsdp._flat_param.FlatParameter": "_is_flat_param _local_shard _params _shared_params",
    "torch.distributed.fsdp._init_utils": "_inter_node_pg",
    "torch.distributed.optim.apply_optimizer_in_backward": "_in_backward_optimizers",
    "torch.distributed.pipelining.stage": "_PipelineStageBase",
    "torch.distributed.tensor.DTensor": "_local_tensor",
    "torch.distributed.tensor._random": "_rng_tracker",
    "torch.distributed.tensor.parallel.ddp": "_st_info",
    "torch.distributed.tensor.placement_types": "_StridedShard",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.utils.data._utils.signal_handling": "_set_worker_signal_handlers",
    f"{LOADERS}.DataLoader": "_get_iterator _index_sampler",
    f"{LOADERS}._BaseDataLoaderIter": "_num_yielded",
    f"{LOADERS}._MultiProcessingDataLoaderIter": "_get_data _reset _task_info _try_put_index "
    "_worker_queue_idx_cycle",
    "torch.distributed.elastic.agent.server.api.SimpleElasticAgent": "_assign_worker_ranks _exit_barrier "
    "_monitor_workers _rendezvous _start_workers _store _worker_group",
    "torch.distributed.elastic.multiprocessing.api.PContext": "_tail_logs",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend": "_matches_machine_hostname",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend.C10dRendezvousBackend": "_NULL_SENTINEL "
    "_call_store _decode_state",
    f"{RENDEZVOUS}.DynamicRendezvousHandler": "_bootstrap_store_info _get_deadline _op_executor _settings "
    "_state_holder _stop_heartbeats _store _this_node",
    f"{RENDEZVOUS}._BackendRendezvousStateHolder": "_backend _cache_duration _sanitize",
    f"{RENDEZVOUS}.RendezvousTimeout": "_set_timeouts",
}
# Of other libraries, of Python, and of classes of ours that others are made of.
NOT_TORCHS = set(
    [
        "_ActionsContainer",
        "_bit_generator",
        "_copy",
        "_current_frames",
        "_get_option_tuples",
        "_getframe",
        "_handed_out",
        "_jitckpt",
        "_look_at",
        "_proxies",
        "_rand",
        "_run_exitfuncs",
        "_use_objects",
        "_what",
    ]
)


def packages(root: Path) -> dict[str, Path]:
    """Return the rooms of the tree in this folder, by the names of the table."""
    inner = {
        init.parent.relative_to(root / "jitckpt").as_posix(): init.parent
        for init in (root / "jitckpt").rglob("__init__.py")
        if not init.parent.is_symlink()
    }
    inner.pop(".", None)
    inner.pop("hooks", None)  # it is mapped into the package from the top of the tree
    return inner | {"hooks": root / "hooks"}


def files_of(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield every file of the package with its room, or its name if it has none."""
    rooms = packages(root)
    for name, folder in rooms.items():
        yield from ((name, file) for file in sorted(folder.glob("*.py")))
    for file in sorted((root / "jitckpt").glob("*.py")):
        yield ("jitckpt" if file.stem == "__init__" else file.stem), file


def imports(file: Path) -> Iterator[str]:
    """Yield the dotted name of all that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room_of(name: str, rooms: Iterable[str]) -> str | None:
    """Return the room of a dotted name, the longest that fits; None if it is not of this package."""
    words = name.split(".")
    if words[0] != "jitckpt" or name == "jitckpt":  # the package itself imports nothing
        return None
    inner = "/".join(words[1:])
    fitting = [room for room in rooms if inner == room or inner.startswith(f"{room}/")]
    return max(fitting, key=len) if fitting else words[1]


def arrows(root: Path) -> dict[tuple[str, str], list[str]]:
    """Return the arrows between the rooms of this tree, with the files that they come from."""
    rooms = packages(root)
    found: dict[tuple[str, str], list[str]] = {}
    for room, file in files_of(root):
        for name in imports(file):
            other = room_of(name, rooms)
            if other not in (None, room):
                found.setdefault((room, str(other)), []).append(f"{file.relative_to(root)} imports {name}")
    return found


def counts(root: Path) -> dict[str, int]:
    """Return how large the house is, as docs/contributing.md has it."""
    files = dict((_module(file.relative_to(root)), file) for _, file in files_of(root))
    between = {
        (name, other)
        for name, file in files.items()
        for imported in imports(file)
        if (other := _nearest(imported, files)) not in (None, "jitckpt", name)
    }
    return {
        "files of Python in the package": len(files),
        "of them in jitckpt/ itself": sum(file.parent == root / "jitckpt" for file in files.values()),
        "folders": len(packages(root)),
        "arrows between files": len(between),
        "arrows between folders": len(arrows(root)),
    }


def _module(path: Path) -> str:
    words = [*(["jitckpt"] if path.parts[0] == "hooks" else []), *path.with_suffix("").parts]
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


def _nearest(name: str, files: Iterable[str]) -> str | None:
    """Return the file that a dotted name is of, or is itself; None if it is not of this package."""
    while name and name not in files:
        name = name.rpartition(".")[0]
    return name or None


def forbidden(found: dict[tuple[str, str], list[str]]) -> list[str]:
    return [
        line
        for (room, other), lines in sorted(found.items())
        if other not in PYTHON.get(room, "").split()
        for line in lines
    ]


def test_every_arrow_between_rooms_is_in_the_table() -> None:
    assert forbidden(arrows(ROOT)) == []


def test_every_arrow_of_the_table_is_used() -> None:
    used = arrows(ROOT)
    assert [
        f"{room} -> {other}"
        for room, others in PYTHON.items()
        for other in others.split()
        if (room, other) not in used
    ] == []


def test_the_rooms_have_no_circle_and_the_table_is_in_their_order() -> None:
    try:
        TopologicalSorter({room: others.split() for room, others in PYTHON.items()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    order = list(PYTHON)
    upward = [
        f"{room} -> {other}"
        for room, others in PYTHON.items()
        for other in others.split()
        if other in PYTHON and order.index(other) < order.index(room)
    ]
    assert upward == []


def native_files(native: Path) -> list[Path]:
    """Return the files of native/, without tests, benchmarks and fuzzers."""
    return [
        file
        for file in sorted(native.rglob("*"))
        if file.suffix in {".h", ".cpp"}
        and not {"tests", "bench", "fuzz"} & {*file.relative_to(native).parts}
    ]


def native_arrows(native: Path) -> dict[tuple[str, str], list[str]]:
    """Return the arrows between the rooms of native/."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in native_files(native):
        inner = file.relative_to(native)
        room = inner.parent.as_posix()
        for name in re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE):
            other = Path(name).parent.as_posix()
            if other not in (".", room):
                found.setdefault((room, other), []).append(f"native/{inner} includes {name}")
    return found


def test_every_include_between_native_rooms_is_in_the_table() -> None:
    used = native_arrows(ROOT / "native")
    table = {(room, other) for room, others in NATIVE.items() for other in others.split()}
    assert [line for arrow in set(used) - table for line in used[arrow]] == []
    assert table - set(used) == set()
    TopologicalSorter({room: others.split() for room, others in NATIVE.items()}).prepare()


def test_the_document_lists_the_rooms_from_the_top_of_the_house_down() -> None:
    listed = _rooms_of_the_document()
    assert {room for room in PYTHON if (ROOT / "jitckpt" / room).is_dir()} - {"decisions/transparent"} <= set(
        listed
    )
    upwards = [
        f"{room} -> {other}"
        for room, others in PYTHON.items()
        for other in others.split()
        if room in listed and other in listed and listed.index(other) < listed.index(room)
    ]
    assert upwards == []


def _rooms_of_the_document() -> list[str]:
    text = (ROOT / "docs" / "how-it-works" / "architecture.md").read_text()
    tree = text.partition("\njitckpt/ ")[2].partition("\nnative/ ")[0]
    rooms: list[str] = []
    outer = ""
    for indent, name in re.findall(r"^( +)(\w+)/ ", tree, re.MULTILINE):
        outer, room = (name, name) if len(indent) == 2 else (outer, f"{outer}/{name}")
        rooms.append(room)
    return rooms


def test_an_include_names_its_room() -> None:
    generated = {
        "entry_points.cpp",
        "environment_table.h",
        "hand_written.h",
        "proxy_by_hand.h",
        "proxy_calls.h",
        "proxy_services.h",
        "real_calls.h",
    }
    nameless = [
        f"{file.relative_to(ROOT)} includes {name}"
        for file in (ROOT / "native").rglob("*")
        if file.suffix in {".h", ".cpp"}
        for name in re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE)
        if name not in generated and not (ROOT / "native" / name).is_file()
    ]
    assert nameless == []


def test_a_planted_include_is_found(tmp_path: Path) -> None:
    (tmp_path / "softgpu").mkdir()
    (tmp_path / "softgpu" / "fault.h").write_text('#include "proxy/wire.h"\n')
    assert native_arrows(tmp_path) == {("softgpu", "proxy"): ["native/softgpu/fault.h includes proxy/wire.h"]}


def test_the_house_is_drawn_with_all_its_rooms() -> None:
    text = (ROOT / "docs" / "how-it-works" / "architecture.md").read_text()
    drawn = set(re.findall(r"^ +(\w+)/  ", text, re.MULTILINE))
    rooms = {Path(room).name for room in packages(ROOT)} - {"transparent"}  # named in the line of decisions/
    native = {file.parent.name for file in (ROOT / "native").glob("*/CMakeLists.txt")} - {"fuzz"}
    assert (rooms | native) - drawn == set()
    assert drawn - (rooms | native) == set()


def test_few_modules_have_no_room() -> None:
    assert len(list((ROOT / "jitckpt").glob("*.py"))) <= 10


def test_a_planted_arrow_is_found(tmp_path: Path) -> None:
    for room in ("decisions", "worker"):
        (tmp_path / "jitckpt" / room).mkdir(parents=True)
        (tmp_path / "jitckpt" / room / "__init__.py").touch()
    (tmp_path / "jitckpt" / "__init__.py").touch()
    (tmp_path / "jitckpt" / "worker" / "job.py").write_text("import jitckpt.errors\n")
    planted = tmp_path / "jitckpt" / "decisions" / "hang.py"
    planted.write_text("def look() -> None:\n    from jitckpt.worker import job\n")
    (tmp_path / "hooks").mkdir()
    assert forbidden(arrows(tmp_path)) == ["jitckpt/decisions/hang.py imports jitckpt.worker.job"]


def test_decisions_are_pure() -> None:
    rooms = packages(ROOT)
    impure = [
        f"{file.relative_to(ROOT)} imports {name}"
        for room, file in files_of(ROOT)
        if room.startswith("decisions")
        for name in imports(file)
        if room_of(name, rooms) not in PURE and name.partition(".")[0] not in PURE_LIBRARIES
    ]
    assert impure == []


# Where what is forbidden elsewhere belongs.
C_LIBRARIES = {"ctypes", "cffi"}
ENVIRONMENT = "wire/environment.py"
VARIABLE = re.compile(r"JITCKPT_[A-Z0-9_]+")


def c_calls(root: Path) -> list[str]:
    """Return where a library of C is called outside of bindings/."""
    return [
        f"{file.relative_to(root)} imports {name}"
        for room, file in files_of(root)
        if room != "bindings"
        for name in imports(file)
        if name.partition(".")[0] in C_LIBRARIES
    ]


def variables_named(root: Path) -> list[str]:
    """Return where a variable of ours is named, and so may be read, outside of wire/environment.py."""
    return [
        f"{file.relative_to(root)} names {node.value}"
        for _, file in files_of(root)
        if file != root / "jitckpt" / ENVIRONMENT
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value)
    ]


def native_variables_named(native: Path) -> list[str]:
    """The same in native/."""
    return [
        f"native/{file.relative_to(native)} names {name}"
        for file in native_files(native)
        for name in re.findall(rf'"({VARIABLE.pattern})"', file.read_text())
    ]


def test_c_is_called_in_bindings_only() -> None:
    assert c_calls(ROOT) == []


def test_a_variable_of_ours_is_named_in_one_place_only() -> None:
    assert variables_named(ROOT) == []
    assert native_variables_named(ROOT / "native") == []


def test_what_is_planted_against_these_laws_is_found(tmp_path: Path) -> None:
    for room in ("bindings", "state", "wire"):
        (tmp_path / "jitckpt" / room).mkdir(parents=True)
        (tmp_path / "jitckpt" / room / "__init__.py").touch()
    (tmp_path / "hooks").mkdir()
    (tmp_path / "native" / "proxy").mkdir(parents=True)
    (tmp_path / "jitckpt" / "bindings" / "libc.py").write_text("import ctypes\n")
    (tmp_path / "jitckpt" / ENVIRONMENT).write_text('NAME = "JITCKPT_NAME"\n')
    assert c_calls(tmp_path) == variables_named(tmp_path) == []
    planted = tmp_path / "jitckpt" / "state" / "shards.py"
    planted.write_text("def look() -> None:\n    from ctypes import CDLL\n    import cffi.api\n")
    (tmp_path / "hooks" / "guard.py").write_text('import os\nos.environ.get("JITCKPT_NAME")\n')
    (tmp_path / "native" / "proxy" / "wire.cpp").write_text(
        'const char* name = std::getenv("JITCKPT_NAME");\n'
    )
    assert c_calls(tmp_path) == [
        "jitckpt/state/shards.py imports ctypes.CDLL",
        "jitckpt/state/shards.py imports cffi.api",
    ]
    assert variables_named(tmp_path) == ["hooks/guard.py names JITCKPT_NAME"]
    assert native_variables_named(tmp_path / "native") == ["native/proxy/wire.cpp names JITCKPT_NAME"]


PRIVATE = re.compile(r"\btorch(?:\.\w+)*?\._[a-zA-Z]\w*(?:\.\w+)*")
# Modules that are only named, to be told from others; they need not be there.
NAMED_ONLY = {"torch._dynamo", "torch._inductor", "torch._inductor.config"}


def private_names(file: Path) -> set[str]:
    """Return the names of torch in a file's code that begin with one underscore."""
    tree = ast.parse(file.read_text())
    named = {name for name in imports(file) if name.startswith("torch.")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            named.add(ast.unparse(node).partition(".__")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            named.add(node.value)
    found = {name for name in named if PRIVATE.fullmatch(name)} - NAMED_ONLY
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def test_torchs_private_names_are_those_of_the_table() -> None:
    seen: dict[str, set[str]] = {}
    for _, file in files_of(ROOT):
        for name in private_names(file):
            seen.setdefault(name, set()).add(file.relative_to(ROOT).as_posix().removeprefix("jitckpt/"))
    assert seen == {name: {file} for name, file in PRIVATE_NAMES.items()}


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_this_torch_has_the_private_name(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ImportError:
        assert hasattr(importlib.import_module(module), attribute), f"torch has taken {name} away"


UNDERSCORED = re.compile(r"_[a-zA-Z]\w*")


def others_private_names(root: Path) -> set[str]:
    """Return the private names that files which know torch ask objects for, and no file of ours gives one.

    Frameworks' own names are in frameworks/. A name that we and torch both have (_store) can't be told apart.
    """
    trees = {file: ast.parse(file.read_text()) for _, file in files_of(root)}
    own = {name for tree in trees.values() for node in ast.walk(tree) for name in _given(node)}
    return {
        name
        for file, tree in trees.items()
        if "frameworks" not in file.parts and re.search(r"\btorch\b", file.read_text())
        for node in ast.walk(tree)
        for name, of_base in _asked_for(node)
        if UNDERSCORED.fullmatch(name) and (of_base or name not in own)
    }


def _given(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return [name]
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
            return [name]
    return []


def _asked_for(node: ast.AST) -> list[tuple[str, bool]]:
    match node:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
            return [(name, True)]
        case ast.Attribute(attr=name):
            return [(name, False)]
        case ast.Call(args=arguments):
            return [
                (one.value, False)
                for one in arguments
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
    return []


def test_private_names_by_an_alias_a_string_or_an_object_are_those_of_the_table() -> None:
    of_table = {name for names in PRIVATE_ATTRIBUTES.values() for name in names.split()}
    by_path = {word for name in PRIVATE_NAMES for word in name.split(".") if word.startswith("_")}
    assert others_private_names(ROOT) - of_table - by_path == NOT_TORCHS


def test_a_planted_private_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "hooks").mkdir()
    (tmp_path / "jitckpt").mkdir()
    (tmp_path / "jitckpt" / "__init__.py").write_text(
        "import torch.distributed as d\nown._given = 1\nd._alias\ngetattr(d, '_string')\n"
        "class A:\n    def _ours(self): self._mine = self._ours() + self._theirs\n"
    )
    assert others_private_names(tmp_path) == {"_alias", "_string", "_theirs", "_given"}


def has(owner: object, name: str) -> bool:
    """Return whether a module or class has this name, or its source gives it to its objects."""
    if hasattr(owner, name):
        return True
    given = re.compile(rf'\b{name}\b(: [^=\n]+)? = |^ +{name}: |"{name}"', re.MULTILINE)
    return any(given.search(_source(one)) for one in getattr(owner, "__mro__", (owner,)))


def _source(owner: Any) -> str:
    try:
        return inspect.getsource(owner)
    except (TypeError, OSError):  # it is of C
        return ""


@pytest.mark.parametrize(
    ("owner", "name"),
    [(owner, name) for owner, names in PRIVATE_ATTRIBUTES.items() for name in names.split()],
)
def test_this_torch_has_the_private_attribute(owner: str, name: str) -> None:
    try:
        found: object = importlib.import_module(owner)
    except ImportError:
        module, _, of_module = owner.rpartition(".")
        found = getattr(importlib.import_module(module), of_module)
    assert has(found, name), f"torch has taken {name} of {owner} away"


def test_a_name_that_torch_has_taken_away_is_missed() -> None:
    assert not has(torch.nn.Module, "_no_such_hooks")
    assert not has(torch.distributed.distributed_c10d, "_no_such_world")


if __name__ == "__main__":
    for what, count in counts(ROOT).items():
        print(f"{count:>5} {what}")
