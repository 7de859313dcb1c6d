"""CUDA C++ with inline PTX -> plain C++: what the host compiler cannot read becomes calls of tests/emulator.

    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n))     ->  do { ::emulator::ptx::bar_sync(id, n); } while (0)
    extern __shared__ __align__(128) char shared[]          ->  char* const shared = ::emulator::dynamic_shared<char>(128)
    __shared__ __align__(128) char shared[kBytes]           ->  auto& shared = ::emulator::static_shared<char[kBytes]>("file:line", 128)
    const __grid_constant__ Params params                   ->  const Params& params

An instruction is called by its full name, modifiers included, so one that ptx.h does not know is a compile error that names it. Only two
parts of names become template arguments: the width of a wgmma product and the rank of a tensor copy. `{...}` becomes list(...), addresses
lose their brackets. Standard library only.
"""

import re

# Comments and string literals are passed over; the groups are what is translated.
_TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|\basm\b\s*(?:volatile\b\s*)?(?P<asm>\()"
    r"|\bextern\s+__shared__\s+(?:__align__\((?P<dynamic_align>\w+)\)\s*)?(?P<dynamic_type>\w+)\s+(?P<dynamic>\w+)\[\]"
    r"|\b__shared__\s+(?:__align__\((?P<static_align>\w+)\)\s*)?(?P<static_type>\w+)\s+(?P<static>\w+)(?P<static_extent>\[[^\]]*\])?(?=;)"
    r"|\bconst\s+__grid_constant__\s+(?P<parameter_type>[\w:<>, ]+?)\s+(?P<parameter>\w+)(?=[,)])",
    re.DOTALL,
)
_PARAMETRISED = ((re.compile(r"m64n(\d+)k16"), "m64nNk16"), (re.compile(r"(?<=tensor\.)([1-5])d(?=\.)"), "Nd"))


class TranslationError(ValueError):
    """A piece of CUDA or PTX that the emulator has no translation for; the message quotes it."""


def translate(text: str, name: str) -> str:
    """A source file of csrc as C++ for the host compiler. Lines keep their numbers; messages of the compiler say `name`."""
    pieces = [f'#line 1 "{name}"\n']
    position = 0
    while match := _TOKEN.search(text, position):
        pieces.append(text[position : match.start()])
        end = match.end()
        if match["asm"]:
            end = _closing(text, match.end() - 1) + 1
            statement = _asm(text[match.end() : end - 1])
        elif match["dynamic"]:
            statement = f"{match['dynamic_type']}* const {match['dynamic']} = " + (
                f"::emulator::dynamic_shared<{match['dynamic_type']}>({match['dynamic_align'] or 16})"
            )
        elif match["static"]:
            whole_type = match["static_type"] + (match["static_extent"] or "")
            line = text.count("\n", 0, match.start()) + 1
            statement = f'auto& {match["static"]} = ::emulator::static_shared<{whole_type}>("{name}:{line}", {match["static_align"] or 16})'
        elif match["parameter"]:
            statement = f"const {match['parameter_type']}& {match['parameter']}"
        else:
            statement = match[0]
        pieces.append(statement + "\n" * (text.count("\n", match.start(), end) - statement.count("\n")))
        position = end
    pieces.append(text[position:])
    return "".join(pieces)


def _closing(text: str, opening: int) -> int:
    """Index of the bracket that closes text[opening]."""
    depth = 0
    for match in re.compile(r'"(?:\\.|[^"\\\n])*"|[()\[\]{}]').finditer(text, opening):
        depth += match[0] in "([{"
        depth -= match[0] in ")]}"
        if depth == 0:
            return match.start()
    raise TranslationError(f"unbalanced brackets: {text[opening : opening + 80]!r}")


def _split(text: str, separator: str) -> list[str]:
    """text.split(separator) outside brackets and strings, stripped."""
    pieces, start, position = [], 0, 0
    while position < len(text):
        if text[position] == '"':
            position = re.compile(r'"(?:\\.|[^"\\])*"').match(text, position).end()
        elif text[position] in "([{":
            position = _closing(text, position) + 1
        else:
            if text[position] == separator:
                pieces.append(text[start:position].strip())
                start = position + 1
            position += 1
    return [*pieces, text[start:].strip()]


def _asm(body: str) -> str:
    """One asm statement as C++: its instructions one after another."""
    template, *sections = _split(body, ":")
    ptx = "".join(re.findall(r'"((?:\\.|[^"\\])*)"', template)).replace("\\n", "\n").replace("\\t", "\t")
    operands = []
    for section in sections[:2]:
        for operand in filter(None, _split(section, ",")):
            match = re.fullmatch(r'"[^"]*"\s*\((.*)\)', operand, re.DOTALL)
            if not match:
                raise TranslationError(f"asm operand {operand!r}")
            operands.append(" ".join(match[1].split()))
    labels, statements = [], []
    for piece in ptx.split(";"):
        piece = piece.strip()
        while prefix := re.match(r"(?:[{}]|(?P<label>\w+):)\s*", piece):  # braces are scopes here; those of lists never come first
            if prefix["label"]:
                labels.append(prefix["label"])
                statements.append(f"{prefix['label']}:;")
            piece = piece[prefix.end() :]
        if piece:
            statements.append(_instruction(piece, operands))
    declared = [f"__label__ {label};" for label in labels]
    return " ".join(["do {", *declared, *statements, "} while (0)"])


def _instruction(ptx: str, operands: list[str]) -> str:
    """One PTX instruction or register declaration as a C++ statement."""
    guard = re.match(r"@(!?)(\w+)\s+", ptx)
    condition = f"if ({guard[1]}{guard[2]}) " if guard else ""
    opcode, _, rest = ptx[guard.end() if guard else 0 :].partition(" ")
    if opcode == ".reg":
        kind, _, names = rest.strip().partition(" ")
        types = {".pred": "bool", ".b32": "uint32_t", ".u32": "uint32_t", ".b64": "uint64_t", ".u64": "uint64_t", ".f32": "float"}
        if kind not in types:
            raise TranslationError(f"PTX register type {kind}")
        return f"{types[kind]} {names};"
    if opcode in ("bra", "bra.uni"):
        return f"{condition}goto {rest.strip()};"
    template_arguments = []
    for pattern, placeholder in _PARAMETRISED:
        template_arguments += pattern.findall(opcode)
        opcode = pattern.sub(placeholder, opcode)
    function = re.sub(r"[.:]", "_", opcode) + (f"<{', '.join(template_arguments)}>" if template_arguments else "")
    arguments = ", ".join(_operand(operand, operands) for operand in _split(rest, ",") if operand)
    return f"{condition}::emulator::ptx::{function}({arguments});"


def _operand(text: str, operands: list[str]) -> str:
    if text.startswith("["):
        return ", ".join(_operand(part, operands) for part in _split(text[1:-1], ","))
    if text.startswith("{"):
        return f"::emulator::ptx::list({', '.join(_operand(part, operands) for part in _split(text[1:-1], ','))})"
    if text == "_":
        return "::emulator::ptx::sink"
    if "|" in text:
        return ", ".join(_operand(part.strip(), operands) for part in text.split("|"))
    return re.sub(r"%(\d+)", lambda match: f"({operands[int(match[1])]})" if text != match[0] else operands[int(match[1])], text)
