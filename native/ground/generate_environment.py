"""Writes the C++ twin of jitckpt/wire/environment.py: names, defaults and limits of what C++ reads.

python native/ground/generate_environment.py OUTPUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from jitckpt.wire.environment import Variable, all_variables

READERS = ("proxy", "libjitckpt_store.so", "all of the job")


def declaration(variable: Variable[object]) -> str:
    """Return the C++ constant of a variable."""
    name = variable.name.removeprefix("JITCKPT_").lower()
    if isinstance(variable.default, bool):
        return f'inline constexpr Number {name}{{"{variable.name}", {int(variable.default)}, 0, 1}};'
    if variable.limits is None:
        return f'inline constexpr Text {name}{{"{variable.name}"}};'
    kind = "Seconds" if "seconds" in variable.kind and "micro" not in variable.kind else "Number"
    default = 0 if variable.default is None else variable.default
    values = f"{default}, {variable.limits.least}, {variable.limits.most}"
    return f'inline constexpr {kind} {name}{{"{variable.name}", {values}}};'


def main() -> None:
    read = [variable for variable in all_variables() if any(one in variable.reader for one in READERS)]
    lines = [
        "// Written by native/ground/generate_environment.py from jitckpt/wire/environment.py.",
        "#pragma once",
        "namespace jitckpt::environment {",
        *map(declaration, read),
        "}  // namespace jitckpt::environment",
    ]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
