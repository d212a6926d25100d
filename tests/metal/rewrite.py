"""A generated Metal text -> C++ for the shim, for the lint, or CUDA.

Only words that C++ does not know are replaced: attributes, address spaces and
threadgroup declarations. Lines keep their numbers, so that compiler and runtime speak
of lines of the Metal text. The rules work on words, not on a syntax tree; what they
cannot express does not compile, it is not silently run as something else.
"""

import re
from itertools import count

from .source import Parameter, Source

_TYPE = r"(?:unsigned\s+)?[\w:]+(?:<[^<>;(){}]*>)?"
_SPACED = re.compile(
    rf"(?P<a>\bconst\s+)?\b(?P<space>device|constant|threadgroup)\s+(?P<b>const\s+)?"
    rf"(?P<type>{_TYPE})(?P<c>\s+const\b)?\s*(?P<mark>[*&])"
)
_SHARED = re.compile(
    rf"\bthreadgroup\s+(?P<type>{_TYPE})\s+(?P<names>\w[^;(){{}}=*&]*);"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ATTRIBUTE = re.compile(r"\[\[\s*\w+(\(\"?\w+\"?\))?\s*\]\]")
_ADDRESS = re.compile(r"(?<=[=(,;{?:+])(\s*)&(\w+)(?=\[)|(?<=return)(\s+)&(\w+)(?=\[)")
_VECTOR = re.compile(
    r"\b((?:float|half|bfloat|u?char|u?short|u?int|u?long)[234]|vec<[^<>]*>)\("
)
_AUTO = re.compile(r"\bauto\s+(\w+)\s*=\s*([^;]+);")


def _without_comments(text: str) -> str:
    return _COMMENT.sub(lambda m: "\n" * m.group().count("\n"), text)


def _split_top(text: str) -> list[str]:
    """Split at the commas that stand outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([<") - (character in ")]>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _dimensions(declarator: str) -> tuple[str, list[str]]:
    """``part[8][N + 1]`` -> ``part``, ``["8", "N + 1"]``."""
    name, _, rest = declarator.strip().partition("[")
    return name.strip(), re.split(r"\]\s*\[", rest.strip()[:-1]) if rest else []


def _shared_memory(text: str) -> str:
    """Declarations of threadgroup memory: one place for all threads."""
    identity = count()

    def declare(match: re.Match) -> str:
        lines = []
        for declarator in _split_top(match["names"]):
            name, sizes = _dimensions(declarator)
            arguments = [str(next(identity)), match["type"], *(f"({s})" for s in sizes)]
            mark = "" if sizes else "&"
            lines.append(
                f"auto{mark} {name} = "
                f'msl::threadgroup_memory<{", ".join(arguments)}>("{name}");'
            )
        return " ".join(lines) + "\n" * match.group().count("\n")

    return _SHARED.sub(declare, text)


def _pointer(match: re.Match) -> str:
    const = "const " if match["a"] or match["b"] or match["c"] else ""
    if match["mark"] == "&":
        return f"{const}{match['type']}&"
    if match["type"] == "auto":
        return "auto"
    return f"msl::ptr<{const}{match['type']}, msl::{match['space']}_space>"


def _plain_pointer(match: re.Match) -> str:
    const = "const " if match["a"] or match["b"] or match["c"] else ""
    return f"{const}{match['type']}{match['mark']}"


def _addresses(text: str) -> str:
    """``&p[i]`` -> ``(p + (i))``, the same thing, which keeps the address space."""
    done = ""
    while match := _ADDRESS.search(text):
        gap, name = match.group(1) or match.group(3) or "", match[2] or match[4]
        end, last = match.end(), match.end()
        while text[end : end + 1] == "[":  # to the end of p[i][j]
            depth, last = 0, end
            for end in range(last, len(text)):
                depth += (text[end] == "[") - (text[end] == "]")
                if depth == 0:
                    break
            end += 1
        done += text[: match.start()]
        if text[end : end + 1] == ".":  # &p[i].x stays as it is
            done, text = done + text[match.start() : end], text[end:]
            continue
        row, index = name + text[match.end() : last], text[last + 1 : end - 1]
        done += f"{gap}({row} + ({index}))"
        text = text[end:]
    return done + text


def _spell(text: str, *, counting: bool) -> str:
    text = _shared_memory(_addresses(_without_comments(text)))
    text = _ATTRIBUTE.sub("", _SPACED.sub(_pointer, text))
    text = text.replace("reinterpret_cast<", "msl::pointer_cast<")
    if counting:
        text = _AUTO.sub(r"auto \1 = msl::value(\2);", text)
    return text


def _argument(parameter: Parameter, index: int) -> str:
    if not parameter.is_buffer:
        return f"msl::attribute(self.{parameter.attribute})"
    const = "const " if parameter.const else ""
    if parameter.mark == "&":
        return f"*reinterpret_cast<{const}{parameter.type}*>(buffers[{index}].begin)"
    space = f"msl::{parameter.space}_space"
    return f"msl::ptr<{const}{parameter.type}, {space}>(buffers[{index}])"


def to_cpp(source: Source, *, counting: bool = False) -> str:
    """C++ that runs the kernel behind ``shim/shim.hpp``; exports ``msl_run``."""
    index = count()
    arguments = ", ".join(
        _argument(p, next(index) if p.is_buffer else 0) for p in source.parameters
    )
    return (
        ("#define MSL_COUNT 1\n" if counting else "")
        + '#include "shim.hpp"\n'
        + f'#line 1 "{source.name}.metal"\n{_spell(source.body, counting=counting)}\n'
        + '#line 1 "call"\n'
        + "static void entry(msl::Buffer* buffers, const msl::Position& self) {\n"
        + f"  {source.call}({arguments});\n}}\n"
        + 'extern "C" __attribute__((visibility("default"))) int msl_run('
        + "msl::Launch* launch) { return msl::launch(entry, launch); }\n"
    )


def to_lint(source: Source) -> str:
    """C++ that is only checked, behind ``shim/lint.hpp``: address spaces stay."""
    text = _ATTRIBUTE.sub("", _without_comments(source.text))
    text = _SHARED.sub(lambda m: "static " + m.group(), text)
    text = _VECTOR.sub(r"msl::make<\1>(", text)
    return f'#include "lint.hpp"\n#line 1 "{source.name}.metal"\n{text}\n'


def to_cuda(source: Source) -> str:
    """CUDA behind ``shim/shim.cuh``; exports ``msl_run_cuda``."""
    text = _without_comments(source.body).replace("[[kernel]] void", "__device__ void")
    text = _SHARED.sub(
        lambda m: m.group().replace("threadgroup", "__shared__", 1), text
    )
    text = _ATTRIBUTE.sub("", _SPACED.sub(_plain_pointer, text))
    arguments = []
    for parameter in source.parameters:
        if not parameter.is_buffer:
            arguments.append(f"msl::{parameter.attribute}()")
            continue
        star = "*" if parameter.mark == "&" else ""
        const = "const " if parameter.const else ""
        index = source.buffers.index(parameter)
        arguments.append(f"{star}static_cast<{const}{parameter.type}*>(a.at[{index}])")
    return (
        f'#include "shim.cuh"\n#line 1 "{source.name}.metal"\n{text}\n#line 1 "call"\n'
        + f"__global__ void entry(msl::Arguments a) {{ {source.call}("
        + ", ".join(arguments)
        + ");}\n"
        + 'extern "C" int msl_run_cuda(void** data, const size_t* sizes, int count, '
        + "const unsigned* grid, const unsigned* block, char* message, int length) {\n"
        + "  return msl::run_on_gpu(entry, data, sizes, count, grid, block, message, "
        + "length);\n}\n"
    )
